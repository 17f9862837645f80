/* SPDX-License-Identifier: Apache-2.0 */
/*
 * NVML, NVIDIA's library that manages cards. It is opened at run time, and each function is looked
 * up by its name before it is called: drivers differ in what they have. Not thread-safe.
 */
#ifndef SLUICE_NVML_H
#define SLUICE_NVML_H

#include <stdint.h>

#define SL_NVML_TEXT 96

/* What the driver does not report is empty, 0, or -1 where 0 has a meaning. */
struct sl_nvml_card {
	char name[SL_NVML_TEXT];
	int64_t domain, bus, device; /* of PCI */
	uint64_t memory;	     /* bytes */
	int major, minor;	     /* the compute capability */
	int mig_now, mig_after;	     /* 1: enabled; -1: it has none */
	int state;		     /* 0: full clocks, to 15 */
};

struct sl_nvml {
	void *library;
	char driver[SL_NVML_TEXT]; /* its version */
	int cuda;		   /* 12040 for 12.4 */
	unsigned cards;
	char why[256]; /* the reason in words, if the result is not SL_NVML_OK */
};

enum { SL_NVML_OK, SL_NVML_NO_LIBRARY, SL_NVML_INCOMPLETE, SL_NVML_NO_DRIVER };

/* Returns one of these. For SL_NVML_NO_DRIVER, code is the result of nvmlInit. */
int sl_nvml_open(struct sl_nvml *n, const char *path, int *code);

/* Of a card that has fallen off the bus nothing is reported. */
void sl_nvml_card(const struct sl_nvml *n, unsigned index, struct sl_nvml_card *card);

/* Ends an sl_nvml_open that returned SL_NVML_OK. The library stays, for good. */
void sl_nvml_close(struct sl_nvml *n);

#endif
