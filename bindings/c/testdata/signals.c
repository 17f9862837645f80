// SPDX-License-Identifier: Apache-2.0
// Handlers that were there before the library was loaded go on working while it works:
// a fault of the program's own, a signal to the process, and a profile's timer. So
// does one that came later with SA_ONSTACK. The library is loaded by dlopen: argv[1].
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include "check.h"

static volatile sig_atomic_t users, profiles, later;
static sigjmp_buf back;
static volatile char *hole;

static void on_fault(int number, siginfo_t *info, void *context)
{
	(void)number, (void)context;
	if (info->si_addr != (void *)hole)
		_exit(3);
	siglongjmp(back, 1);
}

static void on_user(int number) { (void)number, users++; }
static void on_profile(int number) { (void)number, profiles++; }
static void on_later(int number) { (void)number, later++; }

static void install(int number, void (*handler)(int), int flags)
{
	struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
	TRUE(!sigaction(number, &action, NULL));
}

/* Compares the handlers with those of before: the library may have taken what sluice.h says. */
static void untouched(const struct sigaction *before)
{
	for (int number = 1; number < 32; number++) {
		struct sigaction now;
		if (sigaction(number, NULL, &now))
			continue;
		int same = now.sa_handler == before[number].sa_handler;
		int ours = number == SIGSEGV || number == SIGBUS || number == SIGFPE ||
			   number == SIGPIPE || number == SIGURG;
		if (!same && !ours) {
			fprintf(stderr, "signal %d was taken\n", number);
			exit(1);
		}
	}
}

#define LOAD(name)                                                                                 \
	__typeof__(&sluice_##name) p_##name =                                                      \
	    (__typeof__(&sluice_##name))dlsym(library, "sluice_" #name)

int main(int argc, char **argv)
{
	hole = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct sigaction fault = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
	TRUE(argc == 2 && hole != MAP_FAILED && !sigaction(SIGSEGV, &fault, NULL));
	install(SIGUSR1, on_user, SA_RESTART);
	install(SIGPROF, on_profile, SA_RESTART);

	struct sigaction before[32];
	for (int number = 1; number < 32; number++)
		sigaction(number, NULL, &before[number]);
	void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	untouched(before);
	install(SIGUSR2, on_later, SA_RESTART | SA_ONSTACK);
	LOAD(open);
	LOAD(close);
	LOAD(alloc);
	LOAD(register);
	LOAD(self);
	LOAD(remote_find);
	LOAD(transfer_new);
	LOAD(transfer_add);
	LOAD(post);
	LOAD(wait);
	struct sluice_backend list[] = {{.name = "shm"}}; // which copies in C, behind a guard
	struct sluice_config config = {.size = sizeof config,
				       .backends = list,
				       .backends_count = 1};
	uint64_t engine, memory, region, peer, there, t;
	void *bytes;
	TRUE(!p_open(&config, &engine) && !p_alloc(engine, NULL, 1 << 20, &memory, &bytes));
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_MEMORY,
					 .memory = memory};
	TRUE(!p_register(engine, "data", &segment, &region) && !p_self(engine, &peer) &&
	     !p_remote_find(peer, "data", &there));
	struct sluice_desc desc = {0, 1 << 19, 1 << 19};
	TRUE(!p_transfer_new(peer, SLUICE_WRITE, NULL, &t) &&
	     !p_transfer_add(t, region, there, &desc, 1));

	struct itimerval timer = {{0, 1000}, {0, 1000}};
	TRUE(!setitimer(ITIMER_PROF, &timer, NULL));
	int faults = 0;
	for (int i = 0; i < 200 || (profiles == 0 && i < 1000000); i++) {
		TRUE(!p_post(t) && !p_wait(t, LIMIT));
		if (i < 200) {
			// to whichever thread
			TRUE(!kill(getpid(), SIGUSR1) && !kill(getpid(), SIGUSR2));
			if (!sigsetjmp(back, 1))
				*hole = 1;
			else
				faults++;
		}
	}
	for (int i = 0; i < 60000 && (!users || !later); i++)
		usleep(1000);
	timer = (struct itimerval){0};
	TRUE(!setitimer(ITIMER_PROF, &timer, NULL));
	TRUE(faults == 200 && users > 0 && later > 0 && profiles > 0);
	TRUE(!p_close(engine));
	puts("ok");
	return 0;
}
