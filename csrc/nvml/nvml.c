/* SPDX-License-Identifier: Apache-2.0 */
#include "nvml.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/*
 * A function of this name, or NULL; "nvmlInit*" is the newest version that the library has. Others
 * have newer versions of another form.
 */
static void *find(void *library, const char *function)
{
	static const char *const versions[] = { "_v3", "_v2", "" };
	const char *star = strchr(function, '*');
	char name[SL_NVML_TEXT];
	void *f = NULL;

	if (star == NULL)
		return dlsym(library, function);
	for (int i = 0; f == NULL && i < 3; i++) {
		snprintf(name, sizeof name, "%.*s%s", (int)(star - function), function,
			 versions[i]);
		f = dlsym(library, name);
	}
	return f;
}

/* Whether a function is there, and answered that it did what it was asked for. */
#define DID(library, function, types, ...) \
	((f = find(library, function)) != NULL && ((int(*) types)f)(__VA_ARGS__) == 0)

int sl_nvml_open(struct sl_nvml *n, const char *path, int *code)
{
	static const char *const needed[] = { "nvmlInit*", "nvmlShutdown", "nvmlErrorString",
					      "nvmlDeviceGetCount*",
					      "nvmlDeviceGetHandleByIndex*" };
	void *f;

	memset(n, 0, sizeof *n);
	n->library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (n->library == NULL) {
		snprintf(n->why, sizeof n->why, "%s", dlerror());
		return SL_NVML_NO_LIBRARY;
	}
	for (unsigned i = 0; i < sizeof needed / sizeof *needed; i++)
		if (find(n->library, needed[i]) == NULL) {
			snprintf(n->why, sizeof n->why, "%s has no %.*s", path,
				 (int)strcspn(needed[i], "*"), needed[i]);
			return SL_NVML_INCOMPLETE;
		}
	*code = ((int (*)(void))find(n->library, "nvmlInit*"))();
	if (*code != 0) {
		f = find(n->library, "nvmlErrorString");
		snprintf(n->why, sizeof n->why, "%s: %s", path,
			 ((const char *(*)(int))f)(*code));
		return SL_NVML_NO_DRIVER;
	}
	if (!DID(n->library, "nvmlSystemGetDriverVersion", (char *, unsigned), n->driver,
		 SL_NVML_TEXT - 1))
		n->driver[0] = 0;
	if (!DID(n->library, "nvmlSystemGetCudaDriverVersion*", (int *), &n->cuda))
		n->cuda = 0;
	if (!DID(n->library, "nvmlDeviceGetCount*", (unsigned *), &n->cards))
		n->cards = 0;
	return SL_NVML_OK;
}

void sl_nvml_card(const struct sl_nvml *n, unsigned index, struct sl_nvml_card *card)
{
	struct { /* of v3; those before it are shorter */
		char legacy[16];
		unsigned domain, bus, device, id, subsystem;
		char text[32];
	} pci;
	struct {
		unsigned long long total, free, used;
	} memory;
	void *l = n->library, *d = NULL, *f;

	*card = (struct sl_nvml_card){ .domain = -1, .mig_now = -1, .mig_after = -1, .state = -1 };
	if (!DID(l, "nvmlDeviceGetHandleByIndex*", (unsigned, void **), index, &d))
		return;
	if (!DID(l, "nvmlDeviceGetName", (void *, char *, unsigned), d, card->name,
		 SL_NVML_TEXT - 1))
		card->name[0] = 0;
	if (DID(l, "nvmlDeviceGetPciInfo*", (void *, void *), d, &pci)) {
		card->domain = pci.domain;
		card->bus = pci.bus;
		card->device = pci.device;
	}
	if (DID(l, "nvmlDeviceGetMemoryInfo", (void *, void *), d, &memory))
		card->memory = memory.total;
	if (!DID(l, "nvmlDeviceGetCudaComputeCapability", (void *, int *, int *), d, &card->major,
		 &card->minor))
		card->major = card->minor = 0;
	if (!DID(l, "nvmlDeviceGetMigMode", (void *, int *, int *), d, &card->mig_now,
		 &card->mig_after))
		card->mig_now = card->mig_after = -1;
	if (!DID(l, "nvmlDeviceGetPerformanceState", (void *, int *), d, &card->state) ||
	    card->state > 15)
		card->state = -1;
}

void sl_nvml_close(struct sl_nvml *n) { ((int (*)(void))find(n->library, "nvmlShutdown"))(); }
