// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/kv/ring"
)

// A ring under a program in C or Python: a writer, a reader, or a view of one has a handle each,
// and belongs to no engine. sluice_ring_get takes both writers and readers: what they have in
// common is holder.
type holder interface {
	Get(h ring.Handle) (*ring.View, error)
}

var errNoKey = fmt.Errorf("the ring has no object of this key: %w", ring.ErrMiss)

// keep gives what was opened its handle, or closes it.
func keep[T any](t *table[T], v *T, out *C.uint64_t, undo func() error) error {
	h, err := t.put(v)
	if err != nil {
		_ = undo() // nobody has used it
		return err
	}
	*out = C.uint64_t(h)
	return nil
}

// give closes what a handle names, whose handle is stale from then on.
func give[T any](t *table[T], h C.uint64_t, f *C.struct_slgo_fault, end func(*T) error) C.int {
	v, err := t.get(uint64(h))
	if err == nil {
		err = end(v)
	}
	if err == nil {
		t.drop(uint64(h))
	}
	return answer(f, err)
}

//export slgoRingOpen
func slgoRingOpen(c *C.struct_sluice_ring_config, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	note, err := inPlace[byte]((*byte)(c.note), uint64(c.note_length), "sluice_ring_config.note")
	if err == nil && c.flags&^C.SLUICE_RING_SUMS != 0 {
		err = argument("sluice_ring_config.flags is %#x: there is SLUICE_RING_SUMS", c.flags)
	}
	if err != nil {
		return answer(f, err)
	}
	w, err := ring.Open(ring.Config{
		Path:     C.GoString(c.path),
		Bytes:    uint64(c.bytes),
		Objects:  int(c.objects),
		Readers:  int(c.readers),
		Await:    int(c.awaited),
		Sums:     c.flags&C.SLUICE_RING_SUMS != 0,
		Note:     bytes.Clone(note),
		Patience: time.Duration(c.patience_ns),
		Frozen:   time.Duration(c.frozen_ns),
	})
	if err == nil {
		err = keep(&rings, w, out, w.Close)
	}
	return answer(f, err)
}

//export slgoRingPut
func slgoRingPut(h C.uint64_t, key *C.char, parts *C.struct_sluice_ring_part, count C.size_t,
	timeout C.int64_t, out *C.struct_sluice_ring_handle, f *C.struct_slgo_fault) C.int {
	return calling(&rings, h, timeout, f, func(ctx context.Context, w *ring.Writer) error {
		list, err := inPlace[C.struct_sluice_ring_part](parts, uint64(count), "parts")
		if err != nil {
			return err
		}
		from := make([][]byte, len(list))
		for i := range list {
			p := &list[i]
			from[i], err = inPlace[byte]((*byte)(p.bytes), uint64(p.length),
				"sluice_ring_part.bytes")
			if err != nil {
				return err
			}
		}
		handle, err := w.Put(ctx, C.GoString(key), from...)
		if err == nil {
			setHandle(out, handle)
		}
		return err
	})
}

func setHandle(out *C.struct_sluice_ring_handle, h ring.Handle) {
	*out = C.struct_sluice_ring_handle{generation: C.uint64_t(h.Generation), row: C.uint32_t(h.Row)}
}

// findHandle answers with the handle that a Writer's method finds for a key.
func findHandle(h C.uint64_t, key *C.char, out *C.struct_sluice_ring_handle, f *C.struct_slgo_fault,
	find func(w *ring.Writer, key string) (ring.Handle, bool)) C.int {
	return calling(&rings, h, 0, f, func(_ context.Context, w *ring.Writer) error {
		handle, ok := find(w, C.GoString(key))
		if !ok {
			return errNoKey
		}
		setHandle(out, handle)
		return nil
	})
}

//export slgoRingHandOut
func slgoRingHandOut(h C.uint64_t, key *C.char, out *C.struct_sluice_ring_handle,
	f *C.struct_slgo_fault) C.int {
	return findHandle(h, key, out, f, (*ring.Writer).Handle)
}

//export slgoRingFind
func slgoRingFind(h C.uint64_t, key *C.char, out *C.struct_sluice_ring_handle,
	f *C.struct_slgo_fault) C.int {
	return findHandle(h, key, out, f, (*ring.Writer).Find)
}

// ofObject answers for a Writer's method that says whether there was an object of a key.
func ofObject(h C.uint64_t, key *C.char, f *C.struct_slgo_fault,
	do func(w *ring.Writer, key string) bool) C.int {
	return calling(&rings, h, 0, f, func(_ context.Context, w *ring.Writer) error {
		if !do(w, C.GoString(key)) {
			return errNoKey
		}
		return nil
	})
}

//export slgoRingTouch
func slgoRingTouch(h C.uint64_t, key *C.char, f *C.struct_slgo_fault) C.int {
	return ofObject(h, key, f, (*ring.Writer).Touch)
}

//export slgoRingRemove
func slgoRingRemove(h C.uint64_t, key *C.char, f *C.struct_slgo_fault) C.int {
	return ofObject(h, key, f, (*ring.Writer).Remove)
}

//export slgoRingEndTouches
func slgoRingEndTouches(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return ofAll(h, f, (*ring.Writer).EndTouches)
}

//export slgoRingClear
func slgoRingClear(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return ofAll(h, f, (*ring.Writer).Clear)
}

func ofAll(h C.uint64_t, f *C.struct_slgo_fault, do func(*ring.Writer)) C.int {
	return calling(&rings, h, 0, f, func(_ context.Context, w *ring.Writer) error {
		do(w)
		return nil
	})
}

// ringStats is the JSON of sluice_ring_stats.
type ringStats struct {
	Objects int    `json:"objects"`
	Readers int    `json:"readers"`
	Bytes   uint64 `json:"bytes"`
	Free    uint64 `json:"free"`
	Puts    uint64 `json:"puts"`
	Handles uint64 `json:"handles"`
	Evicted uint64 `json:"evicted"`
	Overdue uint64 `json:"overdue"`
	Revoked uint64 `json:"revoked"`
}

//export slgoRingStats
func slgoRingStats(h C.uint64_t, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	w, err := rings.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return handJSON(ringStats(w.Stats()), buffer, capacity, length, f)
}

//export slgoRingClose
func slgoRingClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return give(&rings, h, f, (*ring.Writer).Close)
}

//export slgoRingJoin
func slgoRingJoin(path *C.char, timeout C.int64_t, out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	ctx, cancel := within(timeout)
	defer cancel()
	r, err := ring.Join(ctx, C.GoString(path))
	if err == nil {
		err = keep(&readers, r, out, r.Close)
	}
	return answer(f, err)
}

//export slgoRingNote
func slgoRingNote(h C.uint64_t, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	r, err := readers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return hand(r.Note(), buffer, capacity, length, f)
}

//export slgoRingGone
func slgoRingGone(h C.uint64_t, gone *C.int, f *C.struct_slgo_fault) C.int {
	r, err := readers.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	*gone = isClosed(r.Gone())
	return C.SLUICE_OK
}

//export slgoRingGet
func slgoRingGet(h C.uint64_t, handle *C.struct_sluice_ring_handle, address, length,
	out *C.uint64_t, f *C.struct_slgo_fault) C.int {
	of, err := writerOrReader(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	v, err := of.Get(ring.Handle{Row: uint32(handle.row), Generation: uint64(handle.generation)})
	if err == nil {
		err = keep(&views, v, out, v.Close)
	}
	if err != nil {
		return answer(f, err)
	}
	setAddress(address, v.Bytes())
	*length = C.uint64_t(len(v.Bytes()))
	return C.SLUICE_OK
}

func writerOrReader(h uint64) (holder, error) {
	if w, err := rings.get(h); err == nil {
		return w, nil
	}
	return readers.get(h)
}

//export slgoRingVerify
func slgoRingVerify(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return calling(&views, h, 0, f, func(_ context.Context, v *ring.View) error {
		return v.Verify()
	})
}

//export slgoRingViewClose
func slgoRingViewClose(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	v, err := views.get(uint64(h))
	if err == nil && views.drop(uint64(h)) { // else another thread closes it
		err = v.Close()
	}
	return answer(f, err)
}

//export slgoRingLeave
func slgoRingLeave(h C.uint64_t, f *C.struct_slgo_fault) C.int {
	return give(&readers, h, f, (*ring.Reader).Close)
}
