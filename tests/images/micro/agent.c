/*
 * The heart of the micro guest, run as PID 1, and a systemd service of the debian guest: services that a client outside can probe, and (memory.c) memory whose
 * content can be proved after a checkpoint, a restore or a reboot. tests/images/README.md has the parameters and commands.
 *
 * Two threads. This one runs an epoll loop over every socket, the power button and the tick, and never waits for
 * anything else, so that a client sees a silence only when the VM itself is silent. The worker of memory.c does what
 * takes long.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <linux/fs.h>
#include <linux/input.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

#include "memory.h"

/* PID 1 that exits panics the kernel: loud, and seen by pvpanic, which is what a broken guest should be. */
static void die(const char *what)
{
	printf("rekindle-micro failed: %s: %s\n", what, strerror(errno));
	fflush(stdout);
	exit(1);
}

static bool write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	bool ok = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
	close(fd);
	return ok;
}

/* The value of kernel parameter `name`, or NULL. The last one wins, as in the kernel. */
static const char *parameter(const char *name)
{
	static char line[4096], value[128];
	const char *found = NULL;
	read_file("/proc/cmdline", line, sizeof line);
	for (char *save, *word = strtok_r(line, " \n", &save); word; word = strtok_r(NULL, " \n", &save)) {
		size_t n = strlen(name);
		if (!strncmp(word, name, n) && word[n] == '=') {
			snprintf(value, sizeof value, "%s", word + n + 1);
			found = value;
		}
	}
	return found;
}

/* ------------------------------------------------------------------------------------------------ connections */
enum kind { ECHO, HTTP, LINES, DRAIN, LISTEN, POWER, TICK, REPLY };
struct conn {
	int fd;
	enum kind kind, serves; /* `serves`: what a LISTEN socket accepts */
	uint32_t events;        /* what epoll waits for now */
	bool close_after, waiting; /* close when all is sent; a reply is still being worked out */
	unsigned in_len, out_len, out_off;
	uint64_t body_left, body_pos; /* of a GET /bytes/N reply: sent after `out` */
	char out[256], in[4096];      /* ECHO sends from `in` */
};
static int epfd;
static uint64_t ticks;
static char filler[65536 + 32]; /* body byte i is filler[i % 32] */
static bool ignore_power;
static int after_reply; /* 'p'oweroff, 'r'eboot or 'c'rash once the reply is on its way */

static void watch(struct conn *c, uint32_t events)
{
	struct epoll_event e = { .events = events, .data.ptr = c };
	if (c->events != events)
		epoll_ctl(epfd, EPOLL_CTL_MOD, c->fd, &e);
	c->events = events;
}

static struct conn *add(int fd, enum kind kind)
{
	struct conn *c = calloc(1, sizeof *c); /* untouched pages of in[] cost nothing until used */
	if (!c)
		return NULL;
	c->fd = fd;
	c->kind = kind;
	struct epoll_event e = { .events = c->events = EPOLLIN, .data.ptr = c };
	epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &e);
	return c;
}

/*
 * A card that is up while the kernel shuts its devices down can hang it: with frames sent and not yet reclaimed, virtnet_poll
 * of Linux 6.1.192 spins for ever on the queue that was broken off under it. (Linux 0d0eff39ceb3: "virtio_ring: fix infinite
 * loop in virtnet_poll_cleantx when device is broken".)
 */
static void take_networks_down(void)
{
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct if_nameindex *all = if_nameindex();
	for (struct if_nameindex *i = all; i && i->if_index; i++) {
		struct ifreq request = { 0 };
		strncpy(request.ifr_name, i->if_name, IFNAMSIZ - 1);
		if (!ioctl(fd, SIOCGIFFLAGS, &request)) {
			request.ifr_flags &= ~IFF_UP;
			ioctl(fd, SIOCSIFFLAGS, &request);
		}
	}
	if_freenameindex(all);
	close(fd);
}

static void leave(int how)
{
	sync();
	if (how == 'c')
		write_file("/proc/sysrq-trigger", "c");
	else if (getpid() == 1) {
		take_networks_down();
		reboot(how == 'r' ? RB_AUTOBOOT : RB_POWER_OFF);
	} else /* what systemd takes as its own poweroff and reboot */
		kill(1, SIGRTMIN + (how == 'r' ? 5 : 4));
}

static void answer(struct conn *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void answer(struct conn *c, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	int n = vsnprintf(c->out, sizeof c->out, format, args);
	va_end(args);
	c->out_len = n < (int)sizeof c->out ? (unsigned)n : sizeof c->out - 1;
	c->out_off = 0;
}

/* Sends what is pending. 1: all sent, 0: the socket is full, -1: the peer is gone. */
static int flush(struct conn *c)
{
	const char *from = c->kind == ECHO ? c->in : c->out;
	while (c->out_off < c->out_len) {
		ssize_t n = send(c->fd, from + c->out_off, c->out_len - c->out_off,
				 MSG_NOSIGNAL | (c->body_left ? MSG_MORE : 0));
		if (n < 0)
			return errno == EAGAIN ? 0 : -1;
		c->out_off += (unsigned)n;
	}
	while (c->body_left) {
		size_t want = c->body_left < 65536 ? c->body_left : 65536;
		ssize_t n = send(c->fd, filler + c->body_pos % 32, want, MSG_NOSIGNAL);
		if (n < 0)
			return errno == EAGAIN ? 0 : -1;
		c->body_pos += (uint64_t)n;
		c->body_left -= (uint64_t)n;
	}
	c->out_len = c->out_off = 0;
	return 1;
}

static void consume(struct conn *c, size_t n)
{
	c->in_len -= (unsigned)n;
	memmove(c->in, c->in + n, c->in_len);
}

/* True if header `name` is in the NUL-terminated head, and its value contains `word` (any value if NULL). */
static bool header(const char *head, const char *name, const char *word)
{
	for (const char *line = strstr(head, "\r\n"); line; line = strstr(line, "\r\n")) {
		line += 2;
		size_t n = strlen(name);
		if (!strncasecmp(line, name, n) && line[n] == ':') {
			if (!word)
				return true;
			const char *end = strstr(line, "\r\n"), *at = strcasestr(line + n, word);
			if (at && (!end || at < end))
				return true;
		}
	}
	return false;
}

/* Answers one complete request in c->in; false if there is none yet. */
static bool http_request(struct conn *c)
{
	static const char hello[] = "rekindle-micro\n";
	const char *status = "200 OK";
	char method[8], target[128], text[sizeof c->out];
	int minor;
	char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
	if (!end && c->in_len < sizeof c->in)
		return false;
	uint64_t length = 0;
	bool is_hello = false, head_only = false;
	if (!end) {
		status = "431 Request Header Fields Too Large";
		c->close_after = true;
	} else {
		end[2] = 0; /* keeps the last header's \r\n */
		if (sscanf(c->in, "%7[A-Z] %127s HTTP/1.%d", method, target, &minor) != 3) {
			status = "400 Bad Request";
			c->close_after = true;
		} else if (header(c->in, "Content-Length", NULL) || header(c->in, "Transfer-Encoding", NULL)) {
			status = "413 Content Too Large"; /* no request needs a body; not to be mistaken for a request */
			c->close_after = true;
		} else if (strcmp(method, "GET") && strcmp(method, "HEAD")) {
			status = "405 Method Not Allowed";
		} else {
			char *digits_end = NULL;
			head_only = !strcmp(method, "HEAD");
			if (!strcmp(target, "/"))
				is_hello = true, length = sizeof hello - 1;
			else if (!strncmp(target, "/bytes/", 7) && target[7] >= '0' && target[7] <= '9')
				length = strtoull(target + 7, &digits_end, 10);
			if (!is_hello && (!digits_end || *digits_end))
				status = "404 Not Found", length = 0;
			c->close_after |= header(c->in, "Connection", "close") ||
					  (minor == 0 && !header(c->in, "Connection", "keep-alive"));
		}
	}
	snprintf(text, sizeof text, "HTTP/1.1 %s\r\nContent-Type: text/plain\r\nContent-Length: %llu\r\nConnection: %s\r\n\r\n",
		 status, (unsigned long long)length, c->close_after ? "close" : "keep-alive");
	answer(c, "%s%s", text, is_hello && !head_only ? hello : "");
	c->body_left = is_hello || head_only ? 0 : length;
	c->body_pos = 0;
	consume(c, end ? (size_t)(end + 4 - c->in) : c->in_len);
	return true;
}

/* Runs /phase beside this. Not by fork(): until its exec a child has our connections too, and epoll would go on about those that we have
 * closed. */
static bool announce(const char *phase)
{
	char *words[] = { "/phase", (char *)phase, NULL };
	pid_t pid;
	sigset_t children;
	posix_spawnattr_t attributes;
	sigemptyset(&children);
	sigaddset(&children, SIGCHLD); /* a shell waits for its children */
	posix_spawnattr_init(&attributes);
	posix_spawnattr_setsigdefault(&attributes, &children);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
	bool ok = !posix_spawn(&pid, words[0], NULL, &attributes, words, environ);
	posix_spawnattr_destroy(&attributes);
	return ok;
}

static void post(struct conn *c, const struct memory_job *job)
{
	c->waiting = memory_post(job, c);
	if (!c->waiting)
		answer(c, "error busy with another command\n");
}

/* A variable of UEFI: 4 bytes of attributes (kept without power, for the firmware and the system), then the text. */
#define EFI_VARIABLE "/sys/firmware/efi/efivars/Rekindle-c5a4b9ce-93b4-4d4c-a7a4-1d8b2a1f6f0e"
static const char efi_attributes[4] = { 7 };

static bool efi_variable_set(const char *text)
{
	char value[64];
	size_t n = strnlen(text, sizeof value - 4);
	memcpy(value, efi_attributes, 4);
	memcpy(value + 4, text, n);
	int fd = open(EFI_VARIABLE, O_RDONLY | O_CLOEXEC), flags = 0;
	if (fd >= 0) { /* the kernel makes a variable that it does not know immutable */
		ioctl(fd, FS_IOC_SETFLAGS, &flags);
		close(fd);
	}
	fd = open(EFI_VARIABLE, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
	if (fd < 0)
		return false;
	bool ok = write(fd, value, n + 4) == (ssize_t)(n + 4);
	close(fd);
	return ok;
}

static void efi_variable_get(struct conn *c)
{
	char value[64];
	int fd = open(EFI_VARIABLE, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, value, sizeof value);
	if (fd >= 0)
		close(fd);
	if (n < 4)
		answer(c, "error no such variable\n");
	else
		answer(c, "ok %.*s\n", (int)n - 4, value + 4);
}

/* Sends a TPM the command that `text` has in hexadecimal digits, and answers what it replies. */
static void tpm_command(struct conn *c, const char *text)
{
	unsigned char bytes[256];
	char digits[2 * 120 + 1];
	size_t n = strlen(text) / 2;
	for (size_t i = 0; i < n && i < sizeof bytes; i++)
		sscanf(text + 2 * i, "%2hhx", &bytes[i]);
	int fd = open("/dev/tpm0", O_RDWR | O_CLOEXEC);
	if (fd < 0 || n > sizeof bytes || write(fd, bytes, n) != (ssize_t)n) {
		answer(c, "error the TPM takes no command: %s\n", strerror(errno));
	} else {
		ssize_t length = read(fd, bytes, sizeof bytes);
		digits[0] = 0;
		for (ssize_t i = 0; i < length && i < 120; i++)
			sprintf(digits + 2 * i, "%02x", bytes[i]);
		answer(c, "ok %s\n", digits);
	}
	if (fd >= 0)
		close(fd);
}

static void command(struct conn *c, char *line)
{
	char text[64];
	char *words[5] = { 0 }, *save;
	unsigned n = 0;
	for (char *w = strtok_r(line, " \t\r", &save); w && n < 5; w = strtok_r(NULL, " \t\r", &save))
		words[n++] = w;
	const char *name = n ? words[0] : "";
	if (!strcmp(name, "touch")) {
		struct memory_job job = { .kind = MEMORY_TOUCH, .bytes = n > 1 ? memory_size(words[1]) : 0,
					  .seed = n > 2 ? strtoull(words[2], NULL, 0) : 1 };
		if (job.bytes < MEMORY_PAGE)
			answer(c, "error usage: touch SIZE|all [SEED], SIZE such as 400M\n");
		else
			post(c, &job);
	} else if (!strcmp(name, "verify")) {
		post(c, &(struct memory_job){ .kind = MEMORY_VERIFY });
	} else if (!strcmp(name, "dirty")) {
		if (n < 2 || (n > 3 && strcmp(words[3], "random")))
			answer(c, "error usage: dirty RATE_MB [WINDOW_MB [random]]\n");
		else
			post(c, &(struct memory_job){ .kind = MEMORY_DIRTY,
						      .rate = strtoull(words[1], NULL, 10) << 20,
						      .window = n > 2 ? strtoull(words[2], NULL, 10) << 20 : 0,
						      .random = n > 3 });
	} else if (!strcmp(name, "read") || !strcmp(name, "write")) {
		struct memory_job job = { .kind = *name == 'r' ? DISK_READ : DISK_WRITE,
					  .first = n > 2 ? strtoull(words[2], NULL, 0) : 0,
					  .count = n > 3 ? strtoull(words[3], NULL, 0) : 0,
					  .seed = n > 4 ? strtoull(words[4], NULL, 0) : 1 };
		if (n < 4 || strlen(words[1]) >= sizeof job.disk) {
			answer(c, "error usage: read DISK FIRST COUNT, write DISK FIRST COUNT [SEED], DISK such as vda\n");
		} else {
			strcpy(job.disk, words[1]);
			post(c, &job);
		}
	} else if (!strcmp(name, "uptime")) {
		uint64_t t = now_ns();
		answer(c, "ok %llu.%03llu\n", (unsigned long long)(t / 1000000000), (unsigned long long)(t / 1000000 % 1000));
	} else if (!strcmp(name, "boot-id")) {
		read_file("/proc/sys/kernel/random/boot_id", text, sizeof text);
		answer(c, "ok %s", text); /* the file ends in a newline */
	} else if (!strcmp(name, "tick")) {
		answer(c, "ok %llu\n", (unsigned long long)ticks);
	} else if (!strcmp(name, "drop-caches")) {
		sync();
		answer(c, write_file("/proc/sys/vm/drop_caches", "3") ? "ok\n" : "error cannot write drop_caches\n");
	} else if (!strcmp(name, "online-cpu") && n == 2) {
		snprintf(text, sizeof text, "/sys/devices/system/cpu/cpu%lu/online", strtoul(words[1], NULL, 10));
		answer(c, write_file(text, "1") ? "ok\n" : "error no such processor\n");
	} else if (!strcmp(name, "efi-variable") && n < 3) {
		if (n == 1)
			efi_variable_get(c);
		else
			answer(c, efi_variable_set(words[1]) ? "ok\n" : "error cannot set the variable\n");
	} else if (!strcmp(name, "tpm") && n == 2) {
		tpm_command(c, words[1]);
	} else if (!strcmp(name, "phase") && n == 2) {
		answer(c, announce(words[1]) ? "ok\n" : "error cannot run /phase\n");
	} else if (!strcmp(name, "poweroff") || !strcmp(name, "reboot") || !strcmp(name, "panic")) {
		after_reply = *name == 'p' && name[1] == 'a' ? 'c' : *name;
		answer(c, "ok\n");
	} else {
		answer(c, "error unknown command '%.40s'\n", name);
	}
}

static bool line_request(struct conn *c)
{
	char *end = memchr(c->in, '\n', c->in_len);
	if (!end && c->in_len < sizeof c->in)
		return false;
	if (!end) {
		answer(c, "error line too long\n");
		c->close_after = true;
		c->in_len = 0;
		return true;
	}
	*end = 0;
	size_t used = (size_t)(end + 1 - c->in);
	command(c, c->in);
	consume(c, used);
	return true;
}

static void drop(struct conn *c)
{
	if (c->waiting)
		memory_forget(c);
	close(c->fd);
	free(c);
}

/* Moves a connection on as far as it goes without waiting. Answers are sent in the order of the requests: the next
 * one is looked at only when the last answer has left. May free `c`. */
static void serve(struct conn *c)
{
	for (;;) {
		int sent = flush(c);
		if (sent < 0) {
			drop(c);
			return;
		}
		if (sent == 0) {
			watch(c, EPOLLOUT);
			return;
		}
		if (after_reply) {
			leave(after_reply);
			after_reply = 0;
		}
		if (c->waiting) {
			watch(c, 0); /* a lost peer is still reported, as EPOLLHUP */
			return;
		}
		if (c->close_after && c->kind != DRAIN) {
			/* Closing with unread input would reset the connection and lose the answer. */
			shutdown(c->fd, SHUT_WR);
			c->kind = DRAIN;
		}
		if (c->kind == DRAIN || c->kind == ECHO)
			c->in_len = 0;
		if (c->kind == HTTP ? http_request(c) : c->kind == LINES ? line_request(c) : false)
			continue;
		ssize_t n = recv(c->fd, c->in + c->in_len, sizeof c->in - c->in_len, 0);
		if (n == 0 || (n < 0 && errno != EAGAIN)) {
			drop(c);
			return;
		}
		if (n < 0) {
			watch(c, EPOLLIN);
			return;
		}
		c->in_len += (unsigned)n;
		if (c->kind == ECHO)
			c->out_len = c->in_len, c->out_off = 0;
	}
}

static void job_done(void)
{
	char reply[MEMORY_REPLY];
	struct conn *c = memory_finish(reply);
	if (c) {
		answer(c, "%s\n", reply);
		c->waiting = false;
		serve(c);
	}
}

/* ------------------------------------------------------------------------------------------------------- main */
static void accept_all(struct conn *listener)
{
	int fd, on = 1;
	while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
		if (!add(fd, listener->serves))
			close(fd);
	}
}

static void listen_on(uint16_t port, enum kind serves)
{
	int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 4096))
		die("cannot listen");
	add(fd, LISTEN)->serves = serves;
}

static void find_power_buttons(void)
{
	glob_t found;
	if (glob("/dev/input/event*", 0, NULL, &found))
		return;
	for (size_t i = 0; i < found.gl_pathc; i++) {
		unsigned char keys[KEY_MAX / 8 + 1] = { 0 };
		int fd = open(found.gl_pathv[i], O_RDONLY | O_NONBLOCK | O_CLOEXEC);
		if (fd >= 0 && ioctl(fd, EVIOCGBIT(EV_KEY, sizeof keys), keys) > 0 && keys[KEY_POWER / 8] >> KEY_POWER % 8 & 1)
			add(fd, POWER);
		else if (fd >= 0)
			close(fd);
	}
	globfree(&found);
}

static void power_event(int fd)
{
	struct input_event e;
	while (read(fd, &e, sizeof e) == sizeof e) {
		if (e.type != EV_KEY || e.code != KEY_POWER || e.value != 1)
			continue;
		printf("rekindle-micro power button%s\n", ignore_power ? " ignored" : "");
		if (!ignore_power)
			leave('p');
	}
}

static void tick(int timer, int console, bool print)
{
	uint64_t expired, t = now_ns();
	char text[64];
	if (read(timer, &expired, sizeof expired) != sizeof expired)
		return;
	ticks++;
	int n = snprintf(text, sizeof text, "tick %llu %llu.%03llu\n", (unsigned long long)ticks,
			 (unsigned long long)(t / 1000000000), (unsigned long long)(t / 1000000 % 1000));
	/* A console that nobody reads must not hold the services up: its ticks are lost instead. */
	if (print && write(console, text, (size_t)n) < 0)
		return;
}

/* Tells systemd, where it runs us, that the services listen. */
static void notify_ready(void)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	const char *path = getenv("NOTIFY_SOCKET");
	int fd = path ? socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;
	if (fd < 0)
		return;
	snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
	sendto(fd, "READY=1", 7, 0, (struct sockaddr *)&a, sizeof a);
	close(fd);
}

int main(void)
{
	bool alone = getpid() == 1; /* else init, the power button and HTTP are others' */
	setvbuf(stdout, NULL, _IOLBF, 0);
	signal(SIGPIPE, SIG_IGN);
	if (alone)
		signal(SIGCHLD, SIG_IGN); /* PID 1 inherits orphans, such as the DHCP client; the kernel reaps them */
	struct rlimit files = { 1 << 20, 1 << 20 };
	setrlimit(RLIMIT_NOFILE, &files);
	for (size_t i = 0; i < sizeof filler; i++)
		filler[i] = "abcdefghijklmnopqrstuvwxyz01234\n"[i % 32];

	const char *value = parameter("rekindle.tick");
	long every = value ? strtol(value, NULL, 10) : alone ? 100 : 0;
	ignore_power = (value = parameter("rekindle.ignore_power")) && *value == '1';
	if ((value = parameter("rekindle.touch"))) {
		char reply[MEMORY_REPLY] = "error not a size such as 400M, or none is left";
		uint64_t bytes = memory_size(value);
		if (bytes >= MEMORY_PAGE)
			memory_touch(bytes, 1, reply);
		printf("rekindle-micro touch %s: %s\n", value, reply);
	}
	int done = memory_start();
	if (done < 0)
		die("cannot start the worker");
	if ((epfd = epoll_create1(EPOLL_CLOEXEC)) < 0)
		die("cannot create an epoll instance");
	add(done, REPLY);
	listen_on(7, ECHO);
	listen_on(7000, LINES);
	if (alone) {
		listen_on(80, HTTP);
		find_power_buttons();
	}
	int console = open("/dev/console", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
	long period = every > 0 ? every : 100; /* the counter runs even if it is not printed */
	struct itimerspec beat = { { period / 1000, period % 1000 * 1000000 }, { period / 1000, period % 1000 * 1000000 } };
	timerfd_settime(timer, 0, &beat, NULL);
	add(timer, TICK);
	puts(alone ? "rekindle-micro ready" : "rekindle-agent ready");
	notify_ready();

	for (;;) {
		struct epoll_event events[64];
		int n = epoll_wait(epfd, events, 64, -1);
		bool replied = false;
		for (int i = 0; i < n; i++) {
			struct conn *c = events[i].data.ptr;
			switch (c->kind) {
			case LISTEN: accept_all(c); break;
			case POWER: power_event(c->fd); break;
			case TICK: tick(c->fd, console, every > 0); break;
			case REPLY: replied = true; break;
			default:
				if (events[i].events & (EPOLLHUP | EPOLLERR))
					drop(c);
				else
					serve(c);
			}
		}
		if (replied) /* last: serving may free a connection that still has an event in the array */
			job_done();
	}
}
