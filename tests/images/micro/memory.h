/* Memory with a content that can be proved: filled, verified, and rewritten at a rate. Used by both guests. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MEMORY_PAGE 4096u
#define MEMORY_REPLY 96 /* size of a reply: `ok N`, `bad ...` or `error ...`, without a newline */

/* Time since boot in ns, suspend included. */
uint64_t now_ns(void);
/* The start of file `path`, NUL-terminated; its length, 0 if it cannot be read. */
size_t read_file(const char *path, char *buf, size_t size);

/* "400M", "64K", "2G", "all" (what is available less 48 MiB) as bytes; 0 if it is none of these. */
uint64_t memory_size(const char *text);
/* Replaces the touched area by one of `bytes`, filled from `seed`. Replies `ok PAGES`. */
void memory_touch(uint64_t bytes, uint64_t seed, char reply[MEMORY_REPLY]);
/* Replies `ok PAGES`, `bad INDEX` (the first bad page) or `bad table FOUND of WRITTEN`. */
void memory_verify(char reply[MEMORY_REPLY]);

/* What the worker can be asked for. */
struct memory_job {
	enum { MEMORY_TOUCH, MEMORY_VERIFY, MEMORY_DIRTY, DISK_READ, DISK_WRITE } kind;
	uint64_t bytes, seed;          /* TOUCH; DISK_WRITE: the seed */
	uint64_t rate, window;         /* DIRTY: bytes per second (0 stops); bytes from the area's start (0: all of it) */
	bool random;                   /* DIRTY: in random order, else in sweeps */
	char disk[16];                 /* DISK_*: its name in /dev, the first block, how many */
	uint64_t first, count;
};

/* Starts the worker. Returns an eventfd that becomes readable when a job is done, or -1 with errno. */
int memory_start(void);
/* Gives the worker a job for `owner`; false if it still has one. */
bool memory_post(const struct memory_job *job, void *owner);
/* The owner's client has gone: its reply will be thrown away. */
void memory_forget(const void *owner);
/* Takes the finished job's reply; its owner, or NULL if that has gone or nothing is finished. */
void *memory_finish(char reply[MEMORY_REPLY]);
