// SPDX-License-Identifier: Apache-2.0

//go:build race

package main

// #include <stdlib.h>
// #include "hammer_race.h"
import "C"

import "unsafe"

// hammerFromC has threads of C call the C ABI at random, in a binary that the race detector
// watches: a test cannot have C of its own. It returns how many calls there were, by their
// codes, and the code of a close that failed.
func hammerFromC(seed, rounds int, folder string) (calls uint64, codes [64]uint64, failed int) {
	name := C.CString(folder)
	defer C.free(unsafe.Pointer(name))
	var counts C.struct_hammer_counts
	failed = int(C.hammer(C.uint(seed), C.int(rounds), name, &counts))
	for i, n := range counts.codes {
		codes[i] = uint64(n)
	}
	return uint64(counts.calls), codes, failed
}
