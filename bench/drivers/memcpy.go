// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// memcpyEnd copies the pieces one by one with Go's copy, between two memories of this process: what
// a program does that has both ends at hand.
type memcpyEnd struct {
	both
	huge hostmem.HugePolicy
}

func newMemcpy(args []string) (end, error) {
	if len(args) == 1 && args[0] == "huge" {
		return &memcpyEnd{huge: hostmem.HugeAuto}, nil
	}
	return &memcpyEnd{huge: hostmem.HugeNone}, noArgs(args)
}

// both are the memories of an end that holds both.
type both struct {
	base
	near, far *hostmem.Buffer
}

func (b *both) alloc(r *bench.Request, huge hostmem.HugePolicy) (err error) {
	o := hostmem.Options{Purpose: "bench", Huge: huge, Populate: true}
	if b.near, err = hostmem.Alloc(r.Bytes, o); err == nil {
		b.far, err = hostmem.Alloc(r.FarBytes, o)
	}
	return err
}

// Memory implements bench.End.
func (b *both) Memory() []byte { return b.near.Bytes() }

// Far implements bench.Alone.
func (b *both) Far() []byte { return b.far.Bytes() }

func (b *both) close() {
	for _, m := range []*hostmem.Buffer{b.near, b.far} {
		if m != nil {
			m.Close()
		}
	}
}

// ends are the pieces' destination and source, by the operation.
func ends(op string, near, far []byte, local, remote []int32) (to, from []byte, at, of []int32) {
	if op == bench.OpRead {
		return near, far, local, remote
	}
	return far, near, remote, local
}

// pages says what pages the largest of some memories lies on.
func pages(want hostmem.HugePolicy, memories ...*hostmem.Buffer) string {
	size := uint64(0)
	for _, m := range memories {
		size = max(size, m.PageSize())
	}
	if want == hostmem.HugeAuto && size < 2<<20 {
		return fmt.Sprintf("pages of %d KiB, as the kernel had no larger ones", size>>10)
	}
	return fmt.Sprintf("pages of %d KiB", size>>10)
}

// Open implements bench.End.
func (e *memcpyEnd) Open(r *bench.Request) (bench.Answer, error) {
	if err := e.alloc(r, e.huge); err != nil {
		return bench.Answer{}, err
	}
	return bench.Answer{Version: "Go's copy", Settings: "within one process, " +
		pages(e.huge, e.near, e.far)}, nil
}

// Prepare implements bench.End.
func (e *memcpyEnd) Prepare(op string, size uint64, local, remote []int32) (bench.Posting, error) {
	if op == bench.OpDurable {
		return nil, errDurable
	}
	to, from, at, of := ends(op, e.Memory(), e.Far(), local, remote)
	return posting(func(context.Context) error {
		for i := range at {
			copy(slice(to, at[i], size), slice(from, of[i], size))
		}
		return nil
	}), nil
}

var errDurable = fmt.Errorf("durable writes are of files: %w", bench.ErrUnsupported)
