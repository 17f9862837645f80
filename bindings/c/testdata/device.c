// SPDX-License-Identifier: Apache-2.0
// Host memory to a device and back. argv[1] is a libcuda, or a stand-in for it.
#include <dlfcn.h>

#include "check.h"

typedef int (*call)();

static call driver(void *library, const char *name)
{
	call f;
	*(void **)&f = dlsym(library, name);
	TRUE(f);
	return f;
}

int main(int argc, char **argv)
{
	TRUE(argc == 2);
	char library[4096];
	snprintf(library, sizeof library, "library=%s", argv[1]);
	const char *const options[] = {library, "devices=0", "streams=2", NULL},
			  *const missing[] = {"library=/nowhere", NULL};
	struct sluice_backend list[] = {{.name = "mem"}, {.name = "cuda", .options = missing}};
	struct sluice_config config = {.size = sizeof config,
				       .name = "device",
				       .backends = list,
				       .backends_count = 2};
	struct end e;
	WANT(SLUICE_ERR_UNAVAILABLE, sluice_open(&config, &e.engine));
	TEXT("/nowhere");
	char driver_of_gds[4096];
	snprintf(driver_of_gds, sizeof driver_of_gds, "cuda=%s", argv[1]);
	const char *const no_cufile[] = {driver_of_gds, "library=/nowhere/libcufile.so",
					 "threads=2", NULL};
	list[1] = (struct sluice_backend){.name = "gds", .options = no_cufile};
	WANT(SLUICE_ERR_UNAVAILABLE, sluice_open(&config, &e.engine));
	TEXT("/nowhere/libcufile.so");
	list[1] = (struct sluice_backend){.name = "cuda", .options = options};
	OK(sluice_open(&config, &e.engine));
	OK(sluice_alloc(e.engine, NULL, 1 << 20, &e.memory, (void **)&e.bytes));
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_MEMORY,
					 .memory = e.memory};
	OK(sluice_register(e.engine, "data", &segment, &e.region));

	void *cuda = dlopen(argv[1], RTLD_NOW), *context;
	TRUE(cuda && !driver(cuda, "cuInit")(0) &&
	     !driver(cuda, "cuDevicePrimaryCtxRetain")(&context, 0));
	TRUE(!driver(cuda, "cuCtxSetCurrent")(context));
	uint64_t device = 0;
	TRUE(!driver(cuda, "cuMemAlloc_v2")(&device, (size_t)1 << 20) && device);
	struct sluice_segment there = {.size = sizeof there,
				       .kind = SLUICE_DEVICE,
				       .device = 0,
				       .device_address = device,
				       .length = 1 << 20};
	sluice_region hbm;
	OK(sluice_register(e.engine, "hbm", &there, &hbm));
	sluice_peer self;
	sluice_remote remote;
	OK(sluice_self(e.engine, &self));
	OK(sluice_remote_find(self, "hbm", &remote));
	for (size_t i = 0; i < 1 << 20; i++)
		e.bytes[i] = (unsigned char)(i * 31);
	sluice_transfer t = new_transfer(self, SLUICE_WRITE);
	add_one(t, e.region, remote, 0, 0, 1 << 20);
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	OK(sluice_transfer_close(t));
	memset(e.bytes, 0, 1 << 20);
	t = new_transfer(self, SLUICE_READ);
	add_one(t, e.region, remote, 0, 4096, 65536);
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	for (size_t i = 0; i < 65536; i++)
		TRUE(e.bytes[i] == (unsigned char)((i + 4096) * 31));
	TRUE(!e.bytes[65536]);
	OK(sluice_transfer_close(t));
	OK(sluice_remote_close(remote));
	OK(sluice_region_close(hbm));
	close_end(&e);
	TRUE(!driver(cuda, "cuMemFree_v2")(device) &&
	     !driver(cuda, "cuDevicePrimaryCtxRelease_v2")(0));
	puts("ok");
	return 0;
}
