/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file by which a test moves the stand-in for libibverbs, and sees what it did. It is mapped
 * by the library, and written at fixed places by package internal/testing/standin, which knows
 * the words of a panel by their names.
 */
#ifndef FAKEVERBS_CONTROL_H
#define FAKEVERBS_CONTROL_H

#include <stdatomic.h>
#include <stdint.h>

#define FAKE_DEVICES 8
#define FAKE_PANEL 512 /* bytes, of a panel and of what stands before them */

/* A device. */
struct fake_panel {
	/* What the test wants. */
	_Atomic uint32_t link;	      /* 1: up */
	/*
	 * 1: the device says that it failed, and flushes; 2: and nothing comes back any more, as
	 * when it was pulled out
	 */
	_Atomic uint32_t fatal;
	_Atomic uint32_t frozen; /* 1: nothing is done, as if infinitely slow; 2: nor flushed */
	/* so many requests go before those of fail, lose, late and mute */
	_Atomic uint32_t after;
	_Atomic uint32_t fail;	      /* so many requests end with fail_status, and move nothing */
	_Atomic uint32_t fail_status; /* enum ibv_wc_status */
	_Atomic uint32_t lose;	      /* so many land, and are not acknowledged: retry exceeded */
	_Atomic uint32_t late;	      /* so many are not acknowledged, and land afterwards, */
	/*
	 * after so much time, if the other end is still there; UINT32_MAX: not before this is less
	 */
	_Atomic uint32_t late_us;
	/*
	 * so many are not acknowledged, and land all the same; when the last has, the first has
	 * failed
	 */
	_Atomic uint32_t mute;
	_Atomic uint32_t delay_us;    /* of each request */
	_Atomic uint32_t rate;	      /* bytes in a microsecond; 0: as fast as it goes */
	_Atomic uint32_t register_errno;
	_Atomic uint32_t register_us; /* how long a registration takes */
	/* 1: it finds the pages, with the rights that it needs, as a kernel does that pins them */
	_Atomic uint32_t register_walks;
	_Atomic uint32_t deregister_busy; /* so many deregistrations are refused with EBUSY */
	/*
	 * 1: the device is in trouble, and is there: it says that a completion queue has failed, and
	 * answers each deregistration with EIO
	 */
	_Atomic uint32_t deregister_eio;
	_Atomic uint32_t deregister_us;
	_Atomic uint32_t locked_kib; /* that may be registered in all; 0: no limit */
	_Atomic uint32_t garble;     /* so many messages leave with another byte at garble_at */
	_Atomic uint32_t garble_at;
	_Atomic uint32_t dmabuf_errno; /* EOPNOTSUPP: the driver takes no dma-buf */
	/*
	 * 1: receives that completed are not found until a request that was flushed is. 2: they are
	 * found only by a look that follows another one at the same queue. 3: not until a queue
	 * pair of the device is gone.
	 */
	_Atomic uint32_t blind;
	/*
	 * 1: what a queue pair completed and was not found is gone with it, as on some devices
	 */
	_Atomic uint32_t purge;
	_Atomic uint32_t modify_busy;  /* so many moves to the error state are refused: EBUSY */
	_Atomic uint32_t destroy_busy; /* so many queue pairs are not destroyed: EBUSY */
	_Atomic uint32_t receives_full; /* so many lists of receives are taken but for the last */
	/* Limits, 0: the usual ones. */
	_Atomic uint32_t max_sge, max_inline, max_wr, max_srq_wr, max_cqe;
	/* What there is, and was. */
	_Atomic uint32_t contexts, pds, mrs, channels, cqs, srqs, qps;
	_Atomic uint32_t inlined, completions, kib_landed, kib_locked;
	_Atomic uint32_t receives; /* that were posted */
	_Atomic uint32_t dmabufs;  /* registrations of one */
	_Atomic uint32_t faults;   /* requests that ended in an error that was not a flush */
	_Atomic uint32_t overruns; /* completions for which there was no place */
	_Atomic uint32_t unready;  /* sends that found no receive */
	_Atomic uint32_t landed_late, dropped_late;
};
_Static_assert(sizeof(struct fake_panel) <= FAKE_PANEL, "the test writes at fixed places");

struct fake_control {
	_Atomic uint32_t devices;
	uint8_t gap[FAKE_PANEL - 4];
	union {
		struct fake_panel panel;
		uint8_t room[FAKE_PANEL];
	} device[FAKE_DEVICES];
};

#endif
