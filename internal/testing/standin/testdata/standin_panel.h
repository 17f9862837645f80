/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words by which a test tells the stand-in of libcufile what to do, and sees what there is: in a
 * file that STANDIN_CUFILE_PANEL names when the library is opened, which both map.
 */
#ifndef STANDIN_PANEL_H
#define STANDIN_PANEL_H

struct panel {
	_Atomic unsigned delay_us;	 /* before each request is done */
	_Atomic unsigned hold;		 /* requests wait while this is not 0 */
	_Atomic unsigned short_max;	 /* bytes that a request moves at most; 0: all */
	/* requests at or behind that byte of a file move nothing; 0: all do */
	_Atomic unsigned end_at;
	_Atomic unsigned fail_after;	 /* that request fails; 0: none */
	_Atomic unsigned fail_code;	 /* with this errno, or error of cuFile */
	_Atomic unsigned fail_status;	 /* in a batch, with this status; 0: that of a failure */
	/* entries that a batch takes; 0: as many as it was made for */
	_Atomic unsigned batch_limit;
	_Atomic unsigned batch_result;	 /* of cuFileBatchIOSetUp */
	_Atomic unsigned status_result;	 /* of cuFileBatchIOGetStatus, once */
	_Atomic unsigned cancel_refused; /* so many calls of cuFileBatchIOCancel are */
	_Atomic unsigned open_result;	 /* of cuFileDriverOpen */
	_Atomic unsigned handle_result;	 /* of cuFileHandleRegister */
	_Atomic unsigned register_result; /* of cuFileBufRegister */
	_Atomic unsigned deregister_result; /* of cuFileBufDeregister */
	_Atomic unsigned direct;	 /* nvidia-fs is there; 0: compat mode */
	_Atomic unsigned handles, buffers, batches, under_way; /* that there are */
	_Atomic unsigned reads, writes, submits, opens;	/* calls */
	/* writes that were not aligned */
	_Atomic unsigned changed_blocks;
};

#define PANEL_VARIABLE "STANDIN_CUFILE_PANEL"
#include "../../../../cuda/testdata/standin_words.h"

#endif
