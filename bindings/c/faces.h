/* SPDX-License-Identifier: Apache-2.0 */
/* What the wrappers in C and the exported functions in Go know of each other. */
#ifndef SLUICE_FACES_H
#define SLUICE_FACES_H

#include "sluice.h"

/* The text of an error, on its way from Go to the thread that called. */
struct slgo_fault {
	char text[1024];
};

/* This thread's. */
struct slgo_fault *slgo_fault(void);

/* Keeps a text of ours and returns the code. */
int slgo_refuse(int code, const char *text);

/* 0, or the error of the child of a fork. */
int slgo_check_fork(void);

/*
 * Copies a struct that begins with its size into one of ours, which was zeroed. What
 * is missing stays 0; what we do not know must be 0.
 */
int slgo_copy(void *known, size_t known_size, size_t least, const void *given, const char *name);

/* The size of a struct that ends with a field. */
#define SLGO_THROUGH(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* What slgoKVMove does. */
enum { SLGO_LOAD, SLGO_STORE, SLGO_REPLACE };

/* Has exit() close what is open, from the first call on. */
void slgo_watch_exit(void);

/* The error of an argument that is NULL. */
int slgo_missing(const char *name);

#define SLGO_NEED(p)                              \
	do {                                      \
		if (!(p))                         \
			return slgo_missing(#p);  \
	} while (0)

/* Goes over to Go, unless this is the child of a fork. */
#define SLGO_CALL(function, ...)                                                       \
	do {                                                                           \
		int code_ = slgo_check_fork();                                         \
		return code_ ? code_ : function(__VA_ARGS__, slgo_fault());            \
	} while (0)

#endif
