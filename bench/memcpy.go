// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// copier is one thread's side of a way to move the pieces of a plan.
type copier interface {
	// do moves the batch with the list of places number i, modulo their count.
	do(i int) error
}

// plain copies the pieces one by one with memcpy, between two memories of this
// process: what a program does that has both ends at hand.
type plain struct {
	p         *plan
	compact   []byte // of this thread
	scattered []byte
}

func (c *plain) do(i int) error {
	size, stride, step := c.p.shape.Size, c.p.shape.stride(), c.p.shape.step()
	places := c.p.places[i%len(c.p.places)]
	if (c.p.shape.Op == driver.Write) != c.p.shape.Gather {
		for j, slot := range places {
			copy(c.scattered[uint64(slot)*stride:][:size], c.compact[uint64(j)*step:][:size])
		}
		return nil
	}
	for j, slot := range places {
		copy(c.compact[uint64(j)*step:][:size], c.scattered[uint64(slot)*stride:][:size])
	}
	return nil
}

// memories are the two ends of a baseline.
type memories struct{ compact, scattered *hostmem.Buffer }

func allocMemories(s *Shape, huge hostmem.HugePolicy) (*memories, error) {
	o := hostmem.Options{Purpose: "bench-baseline", Huge: huge, Populate: true}
	compact, err := hostmem.Alloc(s.CompactBytes(), o)
	if err != nil {
		return nil, fmt.Errorf("allocate baseline memory: %w", err)
	}
	scattered, err := hostmem.Alloc(s.ScatteredBytes(), o)
	if err != nil {
		compact.Close()
		return nil, fmt.Errorf("allocate baseline memory: %w", err)
	}
	return &memories{compact, scattered}, nil
}

func (m *memories) close() {
	m.compact.Close()
	m.scattered.Close()
}

func (m *memories) plain(p *plan) copier {
	return &plain{p: p, compact: m.compact.Bytes()[p.compact:],
		scattered: m.scattered.Bytes()[p.scattered:]}
}
