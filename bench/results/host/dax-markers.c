/*
 * Write protection by a userfaultfd on a file with DAX: which page faults come to an end, and which writes are told.
 *
 *     gcc -O1 -static -o dax-markers dax-markers.c && ./dax-markers FILE
 *
 * FILE is made anew on a file system that is mounted with dax=always. Each variant runs in a child that has 8 s. Findings:
 * docs/host-reboot.md, "Why soft-dirty bits".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SIZE (32ul << 20)
#define HUGE_PAGE (2ul << 20)
#define PAGE 4096ul
#define WP_UNPOPULATED (1 << 13) /* linux/userfaultfd.h of Linux 6.7; older headers have neither */
#define WP_ASYNC (1 << 15)
#define IS_WRITTEN (1 << 1) /* linux/fs.h */
#define IS_HUGE (1 << 6)
#define WP_MATCHING 1
#define CHECK_WPASYNC 2

struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, give;
};
struct region {
	uint64_t start, end, categories;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct scan)

static void must(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(2);
	}
}

/* How many pages at `at` are in all of these categories. */
static unsigned long count(char *at, uint64_t flags, uint64_t categories)
{
	static struct region found[16384];
	struct scan scan = {sizeof scan, flags, (uintptr_t)at, (uintptr_t)at + SIZE, 0, (uintptr_t)found, 16384, 0, 0, categories, 0, categories};
	int map = open("/proc/self/pagemap", O_RDONLY);
	long got = ioctl(map, PAGEMAP_SCAN, &scan);
	unsigned long pages = 0;

	must(map >= 0 && got >= 0, "PAGEMAP_SCAN");
	close(map);
	for (long i = 0; i < got; i++)
		pages += (found[i].end - found[i].start) / PAGE;
	return pages;
}

static void variant(const char *path, int huge, int mapped, int by_scan, int read_first)
{
	int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	int fault = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	struct uffdio_api api = {UFFD_API, WP_ASYNC | WP_UNPOPULATED, 0};
	char *at = mmap(NULL, SIZE + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	must(file >= 0 && posix_fallocate(file, 0, SIZE) == 0, path);
	at = (char *)(((uintptr_t)at + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	at = mmap(at, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
	must(at != MAP_FAILED, "mmap");
	if (!huge)
		madvise(at, SIZE, MADV_NOHUGEPAGE);
	for (unsigned long i = 0; mapped && i < SIZE; i += PAGE)
		at[i] = 1;
	printf("  %lu pages mapped by huge ones\n", count(at, 0, IS_HUGE));
	must(fault >= 0 && ioctl(fault, UFFDIO_API, &api) == 0, "userfaultfd");
	struct uffdio_register reg = {{(uintptr_t)at, SIZE}, UFFDIO_REGISTER_MODE_WP, 0};
	must(ioctl(fault, UFFDIO_REGISTER, &reg) == 0, "UFFDIO_REGISTER");
	struct uffdio_writeprotect protect = {{(uintptr_t)at, SIZE}, UFFDIO_WRITEPROTECT_MODE_WP};
	if (by_scan)
		count(at, CHECK_WPASYNC | WP_MATCHING, IS_WRITTEN);
	else
		must(ioctl(fault, UFFDIO_WRITEPROTECT, &protect) == 0, "UFFDIO_WRITEPROTECT");
	if (read_first)
		(void)*(volatile char *)(at + 5 * PAGE);
	*(volatile char *)(at + 7 * PAGE) = 1;
	*(volatile char *)(at + 4 * HUGE_PAGE + PAGE) = 2;
	printf("  2 pages written, %lu told\n", count(at, CHECK_WPASYNC, IS_WRITTEN));
	exit(0);
}

int main(int argc, char **argv)
{
	must(argc == 2, "usage: dax-markers FILE");
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int i = 0; i < 16; i++) {
		int huge = i & 1, mapped = i >> 1 & 1, by_scan = i >> 2 & 1, read_first = i >> 3 & 1;

		printf("%s pages, %s, protected by %s, then %s:\n", huge ? "huge" : "small", mapped ? "mapped" : "not mapped",
		       by_scan ? "PAGEMAP_SCAN" : "UFFDIO_WRITEPROTECT", read_first ? "read and written" : "written");
		pid_t child = fork();
		if (child == 0)
			variant(argv[1], huge, mapped, by_scan, read_first);
		time_t end = time(NULL) + 8;
		int status;
		while (waitpid(child, &status, WNOHANG) == 0) {
			if (time(NULL) > end) {
				printf("  HANGS\n");
				kill(child, 9);
				waitpid(child, &status, 0);
				break;
			}
			usleep(20000);
		}
	}
	unlink(argv[1]);
	return 0;
}
