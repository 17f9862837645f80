// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func prefetch(b []byte)
TEXT ·prefetch(SB), NOSPLIT, $0-24
	MOVD b_base+0(FP), R0
	MOVD b_len+8(FP), R1
	ADD  R0, R1, R1
loop:
	PRFM (R0), PLDL1KEEP
	ADD  $64, R0
	CMP  R1, R0
	BLO  loop
	RET
