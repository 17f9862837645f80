// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// LoopName is how results call the bare loop over ucp_put_nbx and ucp_get_nbx.
const LoopName = "ucx-loop"

// LoopOffer is what the two ends of a loop must exchange.
type LoopOffer = ucp.Offer

// loopLimit bounds a batch, and the end of a loop.
const loopLimit = 5 * time.Second

// LoopEnd is one end of a bare loop over UCX: what a program does that calls libucp
// itself, on memory of libucp's own.
type LoopEnd struct {
	loop   *ucp.Loop
	memory []byte
	spin   func(on bool) error // nil on the passive end
	alone  bool                // the other end need not move

	spinning atomic.Bool
	rested   chan struct{} // nil: never begun
}

// OpenLoop opens one end with that many bytes, faulted in. transports and devices are as
// UCX_TLS and UCX_NET_DEVICES. Without UCX the error is a *driver.UnavailableError.
func OpenLoop(transports, devices string, bytes uint64) (*LoopEnd, error) {
	if err := ucp.Load(""); err != nil {
		return nil, err
	}
	l, err := ucp.OpenLoop(transports, devices)
	if err != nil {
		return nil, err
	}
	memory, err := l.Allocate(bytes)
	if err != nil {
		l.Close(0)
		return nil, err
	}
	return &LoopEnd{loop: l, memory: memory, alone: mapped(transports)}, nil
}

// mapped reports whether all transports go through memory that both ends map: then a
// put is a store, and an end that spins would only take a core from the other.
func mapped(transports string) bool {
	for name := range strings.SplitSeq(transports, ",") {
		if !slices.Contains([]string{"posix", "sysv", "cma", "self", "shm", "sm", "mm", "xpmem",
			"knem"}, name) {
			return false
		}
	}
	return true
}

// Offer is for the other end's Connect.
func (e *LoopEnd) Offer() (LoopOffer, error) { return e.loop.Offer() }

// Connect makes this the active end. spin must have the other end call Spin and
// return when it has: a bare loop has no thread that would answer.
func (e *LoopEnd) Connect(o LoopOffer, spin func(on bool) error) error {
	e.spin = spin
	return e.loop.Connect(o)
}

// Spin has a goroutine move this end, until it is called with false.
func (e *LoopEnd) Spin(on bool) {
	if e.spinning.Swap(on) == on {
		return
	}
	if !on {
		<-e.rested
		return
	}
	e.rested = make(chan struct{})
	go func() {
		defer close(e.rested)
		for e.spinning.Load() {
			e.loop.Progress(200 * time.Microsecond)
		}
	}()
}

// Close ends this end; the active one before the passive one.
func (e *LoopEnd) Close() error {
	var err error
	if e.spin != nil {
		err = e.spin(true)
	}
	e.Spin(false)
	e.loop.Close(loopLimit)
	if e.spin != nil {
		err = errors.Join(err, e.spin(false))
	}
	return err
}

// looped moves the batches of a plan by the bare loop.
type looped struct {
	e       *LoopEnd
	op      driver.Op
	batches []*ucp.Batch
	posting *Samples // of a batch, until its last piece was posted
}

// newLooped makes the descriptors of all lists. Every piece may be under way at once:
// the batch is the window.
func newLooped(e *LoopEnd, p *plan) (*looped, error) {
	c := &looped{e: e, op: p.shape.Op, posting: NewSamples(samplesMax)}
	stride := p.shape.stride()
	for _, places := range p.places {
		descs := make([]driver.Desc, len(places))
		for j, slot := range places {
			descs[j] = driver.Desc{Local: p.compact + uint64(j)*p.shape.step(),
				Remote: p.scattered + uint64(slot)*stride, Len: p.shape.Size}
		}
		b, err := e.loop.Batch(descs, len(descs))
		if err != nil {
			return nil, fmt.Errorf("prepare the bare loop: %w", err)
		}
		c.batches = append(c.batches, b)
	}
	return c, nil
}

func (c *looped) do(i int) error {
	posted, err := c.e.loop.Move(c.op, c.batches[i%len(c.batches)], loopLimit)
	c.posting.Add(posted)
	return err
}

// begin and end stand around a round, outside of what is measured.
func (c *looped) begin() error { return c.move(true) }
func (c *looped) end() error   { return c.move(false) }

func (c *looped) move(on bool) error {
	if c.e.alone {
		return nil
	}
	return c.e.spin(on)
}
