/*
 * A touched page is filled from (seed, page index, generation). The expected generation of each page stands in a
 * table outside the area, and `writes` is the sum of that table. So a page that was lost, swapped with another or
 * silently set back to an older content is found; and if its part of the table was set back with it, the sum shows.
 */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "disk.h"

#define WORDS (MEMORY_PAGE / 8)
#define KEEP_FREE (48ull << 20) /* what `touch all` leaves for the kernel and the sockets */

static struct {
	uint64_t *area;
	uint32_t *generation;
	uint64_t pages, seed, writes;
	uint64_t rate, window, cursor, lcg; /* dirtying: bytes per second, pages it may use, next page */
	bool random;
} mem;

uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_BOOTTIME, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

size_t read_file(const char *path, char *buf, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, buf, size - 1);
	if (fd >= 0)
		close(fd);
	buf[n < 0 ? 0 : n] = 0;
	return n < 0 ? 0 : (size_t)n;
}

/* Word 0 of a page with this seed, index and generation; word i is this + i * STEP. Random enough not to compress. */
#define STEP 0x9e3779b97f4a7c15ull
static uint64_t first_word(uint64_t index)
{
	uint64_t x = mem.seed ^ (index * 0xd1342543de82ef95ull) ^ ((uint64_t)mem.generation[index] << 32);
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static void fill(uint64_t index)
{
	uint64_t *page = mem.area + index * WORDS, w = first_word(index);
	for (unsigned i = 0; i < WORDS; i++, w += STEP)
		page[i] = w;
}

static bool intact(uint64_t index)
{
	const uint64_t *page = mem.area + index * WORDS;
	uint64_t w = first_word(index);
	for (unsigned i = 0; i < WORDS; i++, w += STEP)
		if (page[i] != w)
			return false;
	return true;
}

static uint64_t available_bytes(void)
{
	char text[2048], *at;
	read_file("/proc/meminfo", text, sizeof text);
	at = strstr(text, "MemAvailable:");
	return at ? strtoull(at + 13, NULL, 10) << 10 : 0;
}

uint64_t memory_size(const char *text)
{
	if (!strcmp(text, "all")) {
		uint64_t bytes = available_bytes() + mem.pages * MEMORY_PAGE; /* the old area goes first */
		return bytes > KEEP_FREE ? bytes - KEEP_FREE : 0;
	}
	char *end;
	uint64_t n = strtoull(text, &end, 10);
	switch (*end) {
	case 'K': n <<= 10; end++; break;
	case 'M': n <<= 20; end++; break;
	case 'G': n <<= 30; end++; break;
	}
	return *end || end == text ? 0 : n;
}

void memory_touch(uint64_t bytes, uint64_t seed, char reply[MEMORY_REPLY])
{
	uint64_t pages = bytes / MEMORY_PAGE, limit = available_bytes() + mem.pages * MEMORY_PAGE;
	if (bytes > limit) { /* better an answer than a guest that dies of lack of memory */
		snprintf(reply, MEMORY_REPLY, "error only %llu bytes available", (unsigned long long)limit);
		return;
	}
	if (mem.pages) {
		munmap(mem.area, mem.pages * MEMORY_PAGE);
		munmap(mem.generation, mem.pages * 4);
	}
	mem.pages = mem.writes = mem.cursor = 0;
	mem.area = mmap(NULL, pages * MEMORY_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	mem.generation = mmap(NULL, pages * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem.area == MAP_FAILED || mem.generation == MAP_FAILED) {
		snprintf(reply, MEMORY_REPLY, "error mmap: %s", strerror(errno));
		return;
	}
	mem.seed = seed;
	mem.pages = mem.window = pages;
	for (uint64_t i = 0; i < pages; i++)
		fill(i);
	snprintf(reply, MEMORY_REPLY, "ok %llu", (unsigned long long)pages);
}

void memory_verify(char reply[MEMORY_REPLY])
{
	uint64_t sum = 0;
	for (uint64_t i = 0; i < mem.pages; i++) {
		sum += mem.generation[i];
		if (!intact(i)) {
			snprintf(reply, MEMORY_REPLY, "bad %llu", (unsigned long long)i);
			return;
		}
	}
	if (sum != mem.writes)
		snprintf(reply, MEMORY_REPLY, "bad table %llu of %llu", (unsigned long long)sum,
			 (unsigned long long)mem.writes);
	else
		snprintf(reply, MEMORY_REPLY, "ok %llu", (unsigned long long)mem.pages);
}

static void dirty_one(void)
{
	uint64_t index;
	if (mem.random) {
		mem.lcg = mem.lcg * 6364136223846793005ull + 1442695040888963407ull;
		index = (mem.lcg >> 33) % mem.window;
	} else {
		index = mem.cursor++ % mem.window;
	}
	mem.generation[index]++;
	mem.writes++;
	fill(index);
}

/* ------------------------------------------------------------------------------------------------------ worker */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows, not `mem`, which is the worker's */
static pthread_cond_t wake;
static enum { FREE, POSTED, DONE } state;
static struct memory_job job;
static void *job_owner;
static char job_reply[MEMORY_REPLY];
static int done_fd = -1;

static void run_job(void)
{
	switch (job.kind) {
	case MEMORY_TOUCH:
		memory_touch(job.bytes, job.seed, job_reply);
		break;
	case MEMORY_VERIFY:
		memory_verify(job_reply);
		break;
	case MEMORY_DIRTY:
		mem.rate = job.rate;
		mem.random = job.random;
		mem.window = job.window / MEMORY_PAGE;
		if (!mem.window || mem.window > mem.pages)
			mem.window = mem.pages;
		snprintf(job_reply, MEMORY_REPLY, "ok %llu", (unsigned long long)mem.writes);
		break;
	case DISK_READ:
		disk_read(job.disk, job.first, job.count, job_reply);
		break;
	case DISK_WRITE:
		disk_write(job.disk, job.first, job.count, job.seed, job_reply);
	}
}

#define BEAT_NS 5000000u     /* pages are dirtied in small portions, this far apart */
#define ARREARS_NS 50000000u /* a guest that stood still does not catch up in one burst: at most this much is owed */

static void *worker(void *unused)
{
	uint64_t last = now_ns(), owed = 0;
	pthread_mutex_lock(&lock);
	for (;;) {
		if (state == POSTED) {
			/* POSTED keeps other jobs out, so that the main thread need not wait for the lock meanwhile. */
			pthread_mutex_unlock(&lock);
			run_job();
			pthread_mutex_lock(&lock);
			state = DONE;
			eventfd_write(done_fd, 1);
			last = now_ns();
			owed = 0;
		}
		if (!mem.rate || !mem.pages) {
			pthread_cond_wait(&wake, &lock);
			continue;
		}
		struct timespec until;
		clock_gettime(CLOCK_MONOTONIC, &until);
		until.tv_nsec += BEAT_NS;
		if (until.tv_nsec >= 1000000000) {
			until.tv_nsec -= 1000000000;
			until.tv_sec++;
		}
		if (pthread_cond_timedwait(&wake, &lock, &until) != ETIMEDOUT)
			continue;
		pthread_mutex_unlock(&lock);
		uint64_t now = now_ns(), passed = now - last < ARREARS_NS ? now - last : ARREARS_NS;
		last = now;
		owed += mem.rate * passed / 1000000000;
		if (owed > mem.rate / (1000000000 / ARREARS_NS) + MEMORY_PAGE)
			owed = mem.rate / (1000000000 / ARREARS_NS) + MEMORY_PAGE;
		for (; owed >= MEMORY_PAGE && now_ns() - now < ARREARS_NS; owed -= MEMORY_PAGE)
			dirty_one();
		pthread_mutex_lock(&lock);
	}
	return unused;
}

int memory_start(void)
{
	/* The monotonic clock: a restore sets the real-time clock, and that must not stall or burst the dirtying. */
	pthread_condattr_t monotonic;
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&wake, &monotonic);
	done_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	pthread_t thread;
	if (done_fd < 0 || (errno = pthread_create(&thread, NULL, worker, NULL)))
		return -1;
	return done_fd;
}

bool memory_post(const struct memory_job *wanted, void *owner)
{
	pthread_mutex_lock(&lock);
	bool taken = state == FREE;
	if (taken) {
		job = *wanted;
		job_owner = owner;
		state = POSTED;
		pthread_cond_signal(&wake);
	}
	pthread_mutex_unlock(&lock);
	return taken;
}

void memory_forget(const void *owner)
{
	pthread_mutex_lock(&lock);
	if (job_owner == owner)
		job_owner = NULL;
	pthread_mutex_unlock(&lock);
}

void *memory_finish(char reply[MEMORY_REPLY])
{
	void *owner = NULL;
	eventfd_t count;
	eventfd_read(done_fd, &count);
	pthread_mutex_lock(&lock);
	if (state == DONE) {
		owner = job_owner;
		memcpy(reply, job_reply, MEMORY_REPLY);
		job_owner = NULL;
		state = FREE;
	}
	pthread_mutex_unlock(&lock);
	return owner;
}
