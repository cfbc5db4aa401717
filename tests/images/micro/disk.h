/* Blocks of a disk, through the page cache. Used by both guests. */
#pragma once
#include <stdint.h>

#include "memory.h"

#define DISK_BLOCK 4096u

/* Reads `count` blocks of /dev/`name` from block `first` on. Replies `ok DIGEST` (FNV-1a, 64 bits, hexadecimal). */
void disk_read(const char *name, uint64_t first, uint64_t count, char reply[MEMORY_REPLY]);
/* Writes them, with a content of `seed` and their numbers that does not compress, and makes them last. Replies `ok COUNT`. */
void disk_write(const char *name, uint64_t first, uint64_t count, uint64_t seed, char reply[MEMORY_REPLY]);
