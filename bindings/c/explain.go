// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import "encoding/json"

// handJSON is hand for something that is told as JSON.
func handJSON(v any, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	b, err := json.Marshal(v)
	if err != nil {
		return answer(f, err)
	}
	return hand(append(b, 0), buffer, capacity, length, f)
}

//export slgoExplain
func slgoExplain(h, local, other C.uint64_t, format C.uint32_t, buffer *C.uint8_t,
	capacity C.size_t, length *C.size_t, f *C.struct_slgo_fault) C.int {
	p, err := peers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	r, m, err := pair(local, other)
	if err != nil {
		return answer(f, err)
	}
	x, err := p.of.Explain(p.p, r.r, m.m)
	switch {
	case err != nil:
		return answer(f, err)
	case format == C.SLUICE_TEXT:
		return hand([]byte(x.String()+"\x00"), buffer, capacity, length, f)
	case format == C.SLUICE_JSON:
		return handJSON(x, buffer, capacity, length, f)
	}
	return answer(f, argument("format is %d: there are SLUICE_TEXT and SLUICE_JSON", format))
}
