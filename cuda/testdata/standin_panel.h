/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words by which a test tells the stand-in what to do, and sees what there is: in a file that
 * STANDIN_PANEL names when the library is opened, which both map.
 */
#ifndef STANDIN_PANEL_H
#define STANDIN_PANEL_H

#include <pthread.h>

struct panel {
	_Atomic unsigned delay_us;     /* before each copy or kernel */
	_Atomic unsigned fault_after;  /* the device faults at that copy or kernel; 0: never */
	_Atomic unsigned fault_result; /* and answers so from then on */
	_Atomic unsigned refuse_after; /* that call that copies or launches is refused; 0: none */
	_Atomic unsigned refuse_result;
	_Atomic unsigned pin_result; /* of cuMemHostRegister; 0: it works */
	_Atomic unsigned unpin_result; /* of cuMemHostUnregister; 0: it works */
	_Atomic unsigned hold;	     /* copies of 13 bytes wait while this is not 0 */
	/*
	 * 1: a thread captures a graph, so waits of threads that care for it fail; 2: of all; 3:
	 * events of the program are of streams that are captured
	 */
	_Atomic unsigned capture;
	_Atomic unsigned streams, events, allocations, host_allocations, pins, reservations,
	    mappings, handles, contexts;
	_Atomic unsigned copies, launches; /* calls */
};

#define PANEL_VARIABLE "STANDIN_PANEL"
#include "standin_words.h"

#endif
