// SPDX-License-Identifier: Apache-2.0
//
// A software stand-in of libnvidia-ml.so.1, for tests: two GPUs that exist nowhere. It has the
// functions that package nvml calls, in the form of the public API, and nothing else. What it
// lacks or refuses is chosen when it is compiled: OLD leaves out what drivers before 2020 had not,
// HOLLOW what nothing works without, INIT is the answer of nvmlInit, LOST a GPU off the bus, and
// REFUSE what all questions about a GPU are answered with.

#include <stdio.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, SMALL = 7, GPU_LOST = 15 };

#ifndef INIT
#define INIT OK
#endif
#ifndef REFUSE
#define REFUSE OK
#endif
#ifndef LOST
#define LOST (-1)
#endif

#define GPUS 2

struct gpu { int index; };
static struct gpu gpus[GPUS] = { { 0 }, { 1 } };
static int users;

static int text(char *to, unsigned n, const char *s) {
	if (users == 0) return UNINITIALIZED;
	if (strlen(s) >= n) return SMALL;
	strcpy(to, s);
	return OK;
}

static int number(unsigned *to, unsigned n) {
	if (users == 0) return UNINITIALIZED;
	if (REFUSE != OK) return REFUSE;
	*to = n;
	return OK;
}

static int init(void) {
	if (INIT == OK) users++;
	return INIT;
}

#ifndef HOLLOW
int nvmlShutdown(void) {
	if (users == 0) return UNINITIALIZED;
	users--;
	return OK;
}
#endif

const char *nvmlErrorString(int r) {
	switch (r) {
	case OK: return "Success";
	case UNINITIALIZED: return "Uninitialized";
	case NOT_SUPPORTED: return "Not Supported";
	case 9: return "Driver Not Loaded";
	case GPU_LOST: return "GPU is lost";
	case 18: return "Driver/library version mismatch";
	}
	return "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *to, unsigned n) { return text(to, n, "550.54.15"); }
int nvmlSystemGetCudaDriverVersion(int *v) { *v = 11080; return users ? OK : UNINITIALIZED; }

static int count(unsigned *n) {
	if (users == 0) return UNINITIALIZED;
	*n = GPUS;
	return OK;
}

static int handle(unsigned i, struct gpu **g) {
	if (users == 0) return UNINITIALIZED;
	if (i >= GPUS) return INVALID;
	if ((int)i == LOST) return GPU_LOST;
	*g = &gpus[i];
	return OK;
}

struct old_pci { char bus[16]; unsigned domain, number, device, id; };
struct new_pci { char legacy[16]; unsigned domain, number, device, id, subsystem; char bus[32]; };

static const unsigned bus[GPUS] = { 0x19, 0x9b };

#ifdef OLD
int nvmlInit(void) { return init(); }
int nvmlDeviceGetCount(unsigned *n) { return count(n); }
int nvmlDeviceGetHandleByIndex(unsigned i, struct gpu **g) { return handle(i, g); }

int nvmlDeviceGetPciInfo(struct gpu *g, struct old_pci *p) {
	*p = (struct old_pci){ .domain = 0, .number = bus[g->index], .device = 0 };
	snprintf(p->bus, sizeof p->bus, "0000:%02X:00.0", bus[g->index]);
	return users ? REFUSE : UNINITIALIZED;
}
#else
int nvmlInit_v2(void) { return init(); }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 12040; return users ? OK : UNINITIALIZED; }
int nvmlDeviceGetCount_v2(unsigned *n) { return count(n); }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, struct gpu **g) { return handle(i, g); }

int nvmlDeviceGetPciInfo_v3(struct gpu *g, struct new_pci *p) {
	*p = (struct new_pci){ .domain = 0, .number = bus[g->index], .device = 0 };
	snprintf(p->bus, sizeof p->bus, "00000000:%02X:00.0", bus[g->index]);
	return users ? REFUSE : UNINITIALIZED;
}

int nvmlDeviceGetMigMode(struct gpu *g, unsigned *now, unsigned *after) {
	if (g->index == 1) return NOT_SUPPORTED;
	*now = 0;
	return number(after, 1);
}
#endif

int nvmlDeviceGetName(struct gpu *g, char *to, unsigned n) {
	(void)g;
	return REFUSE != OK ? REFUSE : text(to, n, "Stand-in GPU 80GB");
}

struct memory { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(struct gpu *g, struct memory *m) {
	*m = (struct memory){ 80ull << 30, (79ull - g->index) << 30, (1ull + g->index) << 30 };
	return users ? REFUSE : UNINITIALIZED;
}

int nvmlDeviceGetMemoryInfo_v2(struct gpu *g, struct memory *m) {
	(void)g, (void)m;
	return INVALID; // of another form
}

int nvmlDeviceGetCudaComputeCapability(struct gpu *g, int *major, int *minor) {
	(void)g;
	*major = 9, *minor = 0;
	return users ? REFUSE : UNINITIALIZED;
}

int nvmlDeviceGetPerformanceState(struct gpu *g, unsigned *n)
{
	return number(n, g->index == 0 ? 0 : 32);
}
