// SPDX-License-Identifier: Apache-2.0
// The child of a fork is told so by every call; the parent goes on; exec is fine.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

int main(void)
{
	struct end a = open_end("a", "mem", 1 << 20), b = open_end("b", "mem", 1 << 20);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	add_one(t, a.region, there, 0, 0, 4096);

	pid_t child = fork();
	TRUE(child >= 0);
	if (!child) {
		alarm(60); // a call that hangs is a failure, too
		uint64_t h;
		size_t n;
		int fd;
		struct sluice_config config = {.size = sizeof config};
		struct sluice_notification note = {.size = sizeof note};
		WANT(SLUICE_ERR_FORK, sluice_post(t));
		TEXT("was forked");
		WANT(SLUICE_ERR_FORK, sluice_test(t));
		WANT(SLUICE_ERR_FORK, sluice_wait(t, SLUICE_FOREVER));
		WANT(SLUICE_ERR_FORK, sluice_abort(t, SLUICE_FOREVER));
		WANT(SLUICE_ERR_FORK, sluice_transfer_close(t));
		WANT(SLUICE_ERR_FORK, sluice_open(&config, &h));
		WANT(SLUICE_ERR_FORK, sluice_open(NULL, NULL));
		WANT(SLUICE_ERR_FORK, sluice_alloc(a.engine, NULL, 1, &h, (void **)&h));
		WANT(SLUICE_ERR_FORK, sluice_lease_grant(a.region, 0, 1, NULL, &h));
		WANT(SLUICE_ERR_FORK, sluice_receive(a.engine, &note, NULL, 0, SLUICE_FOREVER));
		WANT(SLUICE_ERR_FORK, sluice_completion_fd(a.engine, &fd));
		WANT(SLUICE_ERR_FORK, sluice_completion_fd(a.engine, NULL));
		WANT(SLUICE_ERR_FORK, sluice_stats(a.engine, NULL, 0, &n));
		WANT(SLUICE_ERR_FORK, sluice_close(a.engine));
		TRUE(sluice_abi_version() == SLUICE_ABI_VERSION && sluice_code_name(0));
		_exit(0);
	}
	int status;
	TRUE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	TRUE(system("true") == 0);
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
