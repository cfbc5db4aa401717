/*
 * The fault experiment's program in its guest (docs/fault-experiment.md): fills the page cache, keeps disk and network busy, puts
 * faults in through /proc/rekindle-fault, and gives out the disk as the guest sees it. Port 7002; a process for each connection, since
 * a fault may take the one that put it in.
 *
 *   fill DISK BLOCKS            reads the blocks of 4096 bytes; `ok`
 *   load DISK BLOCKS SEED HOST  from now on blocks are read, those of the last quarter written, and packets sent to HOST; `ok`
 *   progress                    `ok READ WRITTEN SENT`
 *   fault LINE                  writes LINE to /proc/rekindle-fault; `ok`
 *   send DISK FIRST COUNT       the blocks themselves, through the page cache
 *   cat PATH                    a file, and the end of the connection
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define PORT 7002
#define BLOCK 4096u
#define MOST 8 /* blocks in one request */

static struct progress {
	volatile uint64_t blocks_read, blocks_written, sent;
} *progress;
static unsigned char buffer[64 * BLOCK] __attribute__((aligned(BLOCK)));

static void answer(int to, const char *format, ...)
{
	char text[160];
	va_list values;
	va_start(values, format);
	int length = vsnprintf(text, sizeof text, format, values);
	va_end(values);
	if (write(to, text, (size_t)length) != length)
		exit(1);
}

static void failed(int to, const char *what)
{
	answer(to, "error %s: %s\n", what, strerror(errno));
}

static int open_disk(const char *name, int flags)
{
	char path[64];
	snprintf(path, sizeof path, "/dev/%.32s", name);
	return open(path, flags | O_CLOEXEC);
}

static uint64_t any(uint64_t *state)
{
	uint64_t x = *state += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

/* ------------------------------------------------------------------------------------------------------- load */
static void keep_reading(int disk, uint64_t blocks, uint64_t seed)
{
	for (;; usleep(500)) {
		uint64_t first = any(&seed) % (blocks - MOST), count = 1 + any(&seed) % MOST;
		/* Some of the second half comes from the disk again. The first half stays as it was filled, and so does damage in it. */
		if (first >= blocks / 2 && any(&seed) % 4 == 0)
			posix_fadvise(disk, (off_t)(first * BLOCK), (off_t)(count * BLOCK), POSIX_FADV_DONTNEED);
		if (pread(disk, buffer, count * BLOCK, (off_t)(first * BLOCK)) > 0)
			progress->blocks_read += count;
	}
}

static void keep_writing(int disk, uint64_t blocks, uint64_t seed)
{
	for (unsigned n = 1;; n++, usleep(2000)) {
		uint64_t first = blocks - blocks / 4 + any(&seed) % (blocks / 4 - MOST), count = 1 + any(&seed) % MOST;
		for (size_t at = 0; at < count * BLOCK; at += sizeof(uint64_t)) {
			uint64_t word = any(&seed);
			memcpy(buffer + at, &word, sizeof word);
		}
		if (pwrite(disk, buffer, count * BLOCK, (off_t)(first * BLOCK)) > 0)
			progress->blocks_written += count;
		if (n % 16 == 0)
			fdatasync(disk);
	}
}

static void keep_sending(const char *host)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(9) };
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	inet_pton(AF_INET, host, &to.sin_addr);
	for (;; usleep(1000))
		if (sendto(s, buffer, 1400, 0, (struct sockaddr *)&to, sizeof to) > 0)
			progress->sent++;
}

static void load(int to, const char *name, uint64_t blocks, uint64_t seed, const char *host)
{
	int disk = open_disk(name, O_RDWR);
	if (disk < 0 || blocks / 4 <= MOST) {
		failed(to, name);
		return;
	}
	for (int kind = 0; kind < 3; kind++) {
		pid_t child = fork();
		if (child < 0) {
			failed(to, "fork");
			return;
		}
		if (child == 0) {
			close(to);
			if (kind == 0)
				keep_reading(disk, blocks, seed);
			if (kind == 1)
				keep_writing(disk, blocks, seed + 1);
			keep_sending(host);
		}
	}
	close(disk);
	answer(to, "ok\n");
}

/* --------------------------------------------------------------------------------------------------- commands */
/* Reads to the end of `from`, or `left` bytes; what is read goes to `to` unless that is negative. */
static int copy(int from, int to, uint64_t left)
{
	while (left) {
		ssize_t got = read(from, buffer, left < sizeof buffer ? (size_t)left : sizeof buffer), sent = 0;
		if (got <= 0)
			return (int)got;
		while (to >= 0 && sent < got) {
			ssize_t n = write(to, buffer + sent, (size_t)(got - sent));
			if (n < 0)
				return -1;
			sent += n;
		}
		left -= (uint64_t)got;
	}
	return 0;
}

static void blocks(int to, const char *name, uint64_t first, uint64_t count, int out)
{
	int disk = open_disk(name, O_RDONLY);
	if (disk < 0 || lseek(disk, (off_t)(first * BLOCK), SEEK_SET) < 0 || copy(disk, out, count * BLOCK) < 0) {
		failed(to, name); /* in the middle of blocks it is a line too many or too few, and told by that */
		exit(1);
	}
	close(disk);
	if (out < 0)
		answer(to, "ok\n");
}

static void command(int to, const char *line)
{
	char name[33], host[33];
	unsigned long long first, count;
	if (sscanf(line, "fill %32s %llu", name, &count) == 2) {
		blocks(to, name, 0, count, -1);
	} else if (sscanf(line, "load %32s %llu %llu %32s", name, &count, &first, host) == 4) {
		load(to, name, count, first, host);
	} else if (!strcmp(line, "progress")) {
		answer(to, "ok %llu %llu %llu\n", (unsigned long long)progress->blocks_read,
		       (unsigned long long)progress->blocks_written, (unsigned long long)progress->sent);
	} else if (!strncmp(line, "fault ", 6)) {
		int file = open("/proc/rekindle-fault", O_WRONLY | O_CLOEXEC);
		if (file < 0 || write(file, line + 6, strlen(line + 6)) < 0)
			failed(to, line + 6);
		else
			answer(to, "ok\n");
		close(file);
	} else if (sscanf(line, "send %32s %llu %llu", name, &first, &count) == 3) {
		blocks(to, name, first, count, to);
	} else if (!strncmp(line, "cat ", 4)) {
		int file = open(line + 4, O_RDONLY | O_CLOEXEC);
		if (file < 0 || copy(file, to, UINT64_MAX) < 0)
			failed(to, line + 4);
		exit(0);
	} else {
		answer(to, "error unknown command '%.40s'\n", line);
	}
}

int main(void)
{
	int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	progress = mmap(NULL, sizeof *progress, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	if (progress == MAP_FAILED || bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 16)) {
		perror("faultd");
		return 1;
	}
	signal(SIGCHLD, SIG_IGN);
	signal(SIGPIPE, SIG_IGN);
	/* Never closed: with the last one that has it open, a block device's page cache goes. */
	if (open_disk("vda", O_RDONLY) < 0)
		perror("faultd: vda");
	for (;;) {
		int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		if (client < 0 || fork() != 0) {
			close(client);
			continue;
		}
		char line[256];
		FILE *in = fdopen(dup(client), "r");
		while (in && fgets(line, sizeof line, in)) {
			line[strcspn(line, "\r\n")] = 0;
			command(client, line);
		}
		return 0;
	}
}
