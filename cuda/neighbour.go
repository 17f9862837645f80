// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"encoding/binary"
	"fmt"
	"sync"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
)

// The shape of a step: two blocks a multiprocessor, as one that is bound by memory has, and
// as much arithmetic as leaves it so.
const (
	stepThreads = 256 // SL_STEP_THREADS
	stepBlocks  = 2   // a multiprocessor
	stepRounds  = 4
)

// Neighbour is other work on a card, as that of a decode step: a kernel on a stream of the highest
// priority that reads a memory once and multiplies. How much longer its steps take beside Moves is
// what they cost others. All methods may be called by any goroutine; steps go one after the other.
type Neighbour struct {
	mu     sync.Mutex
	d      *gpu.Device
	args   step
	blocks uint32
	closed bool
}

// step is struct sl_step of decode.cu.
type step struct {
	weights, words, out, done uint64
	rounds, reserved          uint32
}

// OpenNeighbour takes so many bytes of a card's memory, a multiple of 16, for its steps to read.
func OpenNeighbour(o DeviceOptions, bytes uint64) (*Neighbour, error) {
	if bytes == 0 || bytes%16 != 0 {
		return nil, fmt.Errorf("steps that read %d bytes, want a multiple of 16: %w", bytes,
			driver.ErrBounds)
	}
	if err := gpu.Load(o.Library); err != nil {
		return nil, err
	}
	d, err := gpu.Open(o.Ordinal)
	if err != nil {
		return nil, err
	}
	n := &Neighbour{d: d, blocks: uint32(stepBlocks * d.Facts().SMs), args: step{words: bytes / 16,
		rounds: stepRounds}}
	if err := n.open(bytes); err != nil {
		_ = n.Close()
		return nil, fmt.Errorf("open a neighbour on device %d: %w", o.Ordinal, err)
	}
	return n, nil
}

func (n *Neighbour) open(bytes uint64) (err error) {
	n.d.Moves()
	if err = n.d.Urge(); err != nil {
		return err
	}
	if err = n.d.Load(decode.PTX, decode.Kernels); err != nil {
		return err
	}
	for _, m := range []struct {
		at *uint64
		n  uint64
	}{{&n.args.weights, bytes}, {&n.args.out, uint64(n.blocks) * stepThreads * 4},
		{&n.args.done, 8}} {
		if *m.at, err = n.d.Alloc(m.n); err != nil {
			return err
		}
	}
	return nil
}

// Step performs a step and waits for its end. It does not allocate.
func (n *Neighbour) Step() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return driver.ErrClosed
	}
	var done [8]byte
	l := gpu.Launch{Blocks: n.blocks, Threads: stepThreads, Args: n.args.bytes(),
		Tally: n.args.done}
	if err := n.d.Run(&l, done[:]); err != nil {
		return err
	}
	if steps := binary.LittleEndian.Uint64(done[:]); steps != 1 {
		return fmt.Errorf("%d steps were counted for one: %w", steps, driver.ErrCorrupt)
	}
	return nil
}

// Close gives the memory back, after the step under way. It is idempotent.
func (n *Neighbour) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	for _, at := range []uint64{n.args.weights, n.args.out, n.args.done} {
		if at != 0 {
			_ = n.d.Free(at) // the context goes next
		}
	}
	return n.d.Close()
}
