// SPDX-License-Identifier: Apache-2.0
// A program returns from main while a transfer of its own is under way over sockets: all engines
// are closed before it unmaps the memory, also where the thread has lost its stack for signals, as
// Python's main thread has at its end. The owner is another process, and goes on.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define LENGTH (UINT64_C(64) << 20)

static int owner(const char *address, const char *over)
{
	struct end e = open_end("owner", "tcp", LENGTH);
	sluice_listener listener;
	char bound[256];
	OK(sluice_serve(e.engine, "unix", address, bound, sizeof bound, &listener));
	puts("serving");
	fflush(stdout);
	for (int i = 0; i < 120000 && access(over, F_OK) != 0; i++)
		usleep(1000);
	OK(sluice_listener_close(listener));
	close_end(&e);
	return 0;
}

static void *memory;
static sluice_transfer under_way;
static volatile int ready;

static void last(void)
{
	if (!ready)
		return;
	int code = sluice_wait(under_way, 0);
	munmap(memory, LENGTH);
	if (code != SLUICE_ERR_HANDLE) {
		fprintf(stderr, "the transfer is not gone: %s\n", sluice_code_name(code));
		_exit(1);
	}
}

static pthread_t leaving;

static void *interrupt(void *unused)
{
	for (;;) // as the Go runtime does
		pthread_kill(leaving, SIGURG);
	return unused;
}

static void without_signal_stack(void)
{
	stack_t none = {.ss_flags = SS_DISABLE};
	pthread_t other;
	leaving = pthread_self();
	TRUE(!sigaltstack(&none, NULL) && !pthread_create(&other, NULL, interrupt, NULL));
}

static int leaver(const char *address, uint32_t op)
{
	TRUE(atexit(last) == 0);
	memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	TRUE(memory != MAP_FAILED);
	sluice_engine engine = open_engine("leaver", "tcp");
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_HOST,
					 .length = LENGTH,
					 .host = memory};
	sluice_region region;
	sluice_peer peer;
	sluice_remote there;
	OK(sluice_register(engine, "mine", &segment, &region));
	OK(sluice_dial(engine, "unix", address, LIMIT, &peer));
	OK(sluice_remote_find(peer, "data", &there));
	under_way = new_transfer(peer, op);
	add_one(under_way, region, there, 0, 0, LENGTH);
	OK(sluice_post(under_way));
	TRUE(atexit(without_signal_stack) == 0);
	ready = 1;
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 3)
		return owner(argv[2], argv[3]);
	if (argc > 2)
		return leaver(argv[2], !strcmp(argv[1], "read") ? SLUICE_READ : SLUICE_WRITE);
	char address[] = "/tmp/sluice-c-XXXXXX", socket[64], over[64], line[16], command[512];
	TRUE(mkdtemp(address));
	snprintf(socket, sizeof socket, "%s/s", address);
	snprintf(over, sizeof over, "%s/over", address);
	snprintf(command, sizeof command, "exec '%s' owner '%s' '%s'", argv[0], socket, over);
	FILE *child = popen(command, "r");
	TRUE(child && fgets(line, sizeof line, child));
	const char *const ops[] = {"read", "write"};
	for (int i = 0; i < 2; i++) {
		snprintf(command, sizeof command, "exec '%s' %s '%s'", argv[0], ops[i], socket);
		TRUE(system(command) == 0);
	}
	TRUE(mkdir(over, 0700) == 0 && pclose(child) == 0);
	rmdir(over);
	rmdir(address);
	puts("ok");
	return 0;
}
