/*
 * rekindle-touch SIZE|all [SEED]: fills that much memory with a pattern that can be verified, says `ok PAGES`, and
 * holds it until killed. SIGUSR1 verifies it and says `ok PAGES` or `bad INDEX`. For example:
 *     systemd-run --unit touch rekindle-touch 400M;  systemctl kill -s USR1 touch;  journalctl -u touch
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "memory.h"

int main(int argc, char **argv)
{
	char reply[MEMORY_REPLY];
	uint64_t bytes = argc > 1 ? memory_size(argv[1]) : 0;
	if (bytes < MEMORY_PAGE || argc > 3) {
		fprintf(stderr, "usage: rekindle-touch SIZE|all [SEED], SIZE such as 400M\n");
		return 2;
	}
	sigset_t set;
	int number;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);
	memory_touch(bytes, argc > 2 ? strtoull(argv[2], NULL, 0) : 1, reply);
	puts(reply);
	if (reply[0] != 'o')
		return 1;
	while (sigwait(&set, &number) == 0) {
		memory_verify(reply);
		puts(reply);
	}
	return 1;
}
