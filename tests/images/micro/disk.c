/* Blocks of a disk; see disk.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "disk.h"

/* A disk's name is no path. */
static int open_disk(const char *name, int flags)
{
	char path[64];
	if (strchr(name, '/') || snprintf(path, sizeof path, "/dev/%s", name) >= (int)sizeof path) {
		errno = EINVAL;
		return -1;
	}
	return open(path, flags | O_CLOEXEC);
}

static void failed(const char *what, const char *name, char reply[MEMORY_REPLY])
{
	snprintf(reply, MEMORY_REPLY, "error %s %.16s: %s", what, name, strerror(errno));
}

void disk_read(const char *name, uint64_t first, uint64_t count, char reply[MEMORY_REPLY])
{
	static unsigned char block[DISK_BLOCK];
	uint64_t digest = 0xcbf29ce484222325u;
	int fd = open_disk(name, O_RDONLY);
	if (fd < 0) {
		failed("opening", name, reply);
		return;
	}
	for (uint64_t n = first; n < first + count; n++) {
		ssize_t got = pread(fd, block, sizeof block, (off_t)(n * DISK_BLOCK));
		if (got != (ssize_t)sizeof block) {
			if (got >= 0)
				errno = ENODATA;
			failed("reading", name, reply);
			close(fd);
			return;
		}
		for (size_t i = 0; i < sizeof block; i++)
			digest = (digest ^ block[i]) * 0x100000001b3u;
	}
	close(fd);
	snprintf(reply, MEMORY_REPLY, "ok %016llx", (unsigned long long)digest);
}

void disk_write(const char *name, uint64_t first, uint64_t count, uint64_t seed, char reply[MEMORY_REPLY])
{
	static uint64_t block[DISK_BLOCK / sizeof(uint64_t)];
	int fd = open_disk(name, O_WRONLY);
	if (fd < 0) {
		failed("opening", name, reply);
		return;
	}
	bool ok = true;
	for (uint64_t n = first; ok && n < first + count; n++) {
		for (size_t i = 0; i < sizeof block / sizeof *block; i++) {
			uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15u ^ (n * 512 + i) * 0xd1b54a32d192ed03u;
			block[i] = (x ^ x >> 29) * 0xbf58476d1ce4e5b9u;
		}
		ok = pwrite(fd, block, sizeof block, (off_t)(n * DISK_BLOCK)) == (ssize_t)sizeof block;
	}
	ok = ok && !fsync(fd);
	if (ok)
		snprintf(reply, MEMORY_REPLY, "ok %llu", (unsigned long long)count);
	else
		failed("writing", name, reply);
	close(fd);
}
