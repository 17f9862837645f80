// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
)

// mover hands requests to threads in C, which hand them to cuFile. The threads put completions into
// a ring. They signal the core's event at the first completion after Arm, and heed at each one
// while Listen asks for that.
type mover struct {
	core  *files.Core
	cfg   Config
	facts Facts
	ends  *gpu.Ends
	c     *cufile.Mover

	heed     *proc.Event // wakes the goroutine that completes requests without Poll
	attended sync.WaitGroup
	heeding  bool                     // C signals heed; guarded by Core.Mu
	nudge    atomic.Bool              // Kick must signal heed, for completions from before Listen
	landed   [files.ReapMax]ring.Done // guarded by Core.Mu

	put   atomic.Int32       // len(out), for Kick, which does not lock
	mu    sync.Mutex         // guards out and spare; taken after Core.Mu
	out   []cufile.Request   // requests for the next call into C
	spare [][]cufile.Request // slices to use again for out
}

func openMover(core *files.Core, cfg Config, facts Facts) (_ *mover, err error) {
	m := &mover{core: core, cfg: cfg, facts: facts}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	if m.heed, err = proc.NewEvent(); err != nil {
		return nil, err
	}
	slots := 1 << bits.Len(uint(cfg.Depth-1))
	if m.ends, err = gpu.NewEnds(slots, core.Event.FD(), m.heed.FD()); err != nil {
		return nil, err
	}
	most := 1
	if cfg.Way == WayBatch {
		most = cfg.BatchMax
	}
	if m.c, err = cufile.OpenMover(m.ends, slots, cfg.Threads, most); err != nil {
		return nil, err
	}
	m.attended.Go(func() { // completes requests without a call of Poll
		for m.heed.Wait() == nil {
			for m.Pending() {
				core.Serve()
			}
		}
	})
	return m, nil
}

// Put implements files.Mover. A write through the page cache is an edge. It can be longer than
// EdgeMax if cuFile stopped within a block; then it is done in several parts.
func (m *mover) Put(r *files.Request) {
	b := r.Memory.Own.(*buffer)
	at := r.Places[0]
	c := cufile.Request{Handle: r.File.Own.(uint64), Base: at.At, At: r.Off + r.Done, Len: at.Len,
		Slot: uint32(r.Slot), FD: int32(r.File.FD), Device: uint16(r.Memory.Device)}
	if b.registered() { // cuFile wants the registered address and an offset from it
		c.Base, c.Offset = b.at, at.At-b.at
	}
	switch {
	case r.Kind == files.Write && !r.Direct:
		c.Kind, c.Len = cufile.Edge, min(at.Len, cufile.EdgeMax)
	case r.Kind == files.Write:
		c.Kind = cufile.Write
	}
	m.c.Cancel(c.Slot, r.Ending.Load())
	m.mu.Lock()
	m.out = append(m.out, c)
	m.put.Store(int32(len(m.out)))
	m.mu.Unlock()
}

// Cancel implements files.Mover. The threads do not begin a cancelled request.
func (m *mover) Cancel(r *files.Request) { m.c.Cancel(uint32(r.Slot), true) }

// Kick implements files.Mover. One call into C passes on all queued requests, also those that other
// goroutines have put.
func (m *mover) Kick() {
	if m.put.Load() > 0 {
		m.mu.Lock()
		full := m.out
		m.out = nil
		if n := len(m.spare); n > 0 {
			m.out, m.spare = m.spare[n-1], m.spare[:n-1]
		} else {
			m.out = make([]cufile.Request, 0, m.cfg.Depth)
		}
		m.put.Store(0)
		m.mu.Unlock()
		if len(full) > 0 {
			m.c.Put(full)
		}
		m.mu.Lock()
		m.spare = append(m.spare, full[:0])
		m.mu.Unlock()
	}
	if m.nudge.Load() && m.nudge.CompareAndSwap(true, false) {
		_ = m.heed.Signal() // fails only when closed
	}
}

// Pending implements files.Mover.
func (m *mover) Pending() bool { return m.ends.Pending() }

// Reap implements files.Mover.
func (m *mover) Reap(out []files.Landing) int {
	n := m.ends.Poll(m.landed[:len(out)])
	for i := range n {
		d := &m.landed[i]
		out[i] = files.Landing{R: m.core.Request(int(d.Tag)), N: int(d.Status)}
		if d.Status < 0 {
			out[i].Err = cufile.Status(out[i].R.Kind.String(), d)
		}
	}
	return n
}

// Listen implements files.Mover.
func (m *mover) Listen(need bool) {
	switch {
	case need && !m.heeding:
		m.ends.AddWaiting(1)
		m.nudge.Store(true)
	case !need && m.heeding:
		m.ends.AddWaiting(-1)
	}
	m.heeding = need
}

// Arm implements files.Mover.
func (m *mover) Arm() (pending bool) { return m.ends.Arm() }

// Wake implements files.Mover.
func (m *mover) Wake() {
	if m.ends.Disarm() {
		_ = m.core.Event.Signal() // fails only when closed: nothing sleeps any more
	}
}

// AddFile implements files.Mover. cuFile needs O_DIRECT to bypass host memory; newer libraries also
// accept a file without it. If cuFile refuses a file, because of its filesystem and without compat
// mode, the error wraps a *cufile.Error.
func (m *mover) AddFile(f *files.File) error {
	switch {
	case f.Buffered:
		return fmt.Errorf("cuFile goes past the page cache, and Segment.Buffered asks for it: use "+
			"posix, or leave Buffered out: %w", driver.ErrNotSupported)
	case f.Flags&unix.O_ACCMODE == unix.O_WRONLY:
		return fmt.Errorf("the descriptor may only be written: use posix, or open it with O_RDWR: "+
			"%w", driver.ErrNotSupported)
	}
	fd := f.Direct
	if fd < 0 {
		fd = f.FD
	}
	f.Block, f.Align = blockBytes, 1
	handle, err := cufile.Open(fd)
	f.Own = handle
	return err
}

// DropFile implements files.Mover.
func (m *mover) DropFile(f *files.File) error {
	cufile.Close(f.Own.(uint64))
	return nil
}

// AddMemory implements files.Mover. The range must be allocated, all of it on the device.
func (m *mover) AddMemory(mem *files.Memory, seg *driver.Segment) error {
	if err := hostmem.CheckNotLent(seg.Addr, seg.Len); err != nil {
		return err
	}
	if seg.Device < 0 || seg.Device >= cufile.Devices {
		return fmt.Errorf("device %d is not within 0 to %d: %w", seg.Device, cufile.Devices-1,
			driver.ErrBounds)
	}
	if err := m.c.Use(seg.Device); err != nil {
		return err
	}
	whose, until, err := m.c.DeviceOf(seg.Device, seg.Addr, seg.Len)
	switch {
	case err != nil && until > seg.Addr:
		return fmt.Errorf("%d bytes of device memory at %#x: only %d of them are allocated: %w",
			seg.Len, seg.Addr, until-seg.Addr, driver.ErrBounds)
	case err != nil:
		return fmt.Errorf("%d bytes at %#x, which is not device memory, or was freed: %w (%w)",
			seg.Len, seg.Addr, driver.ErrBounds, err)
	case whose != seg.Device:
		return fmt.Errorf("%d bytes at %#x, which are of device %d and not of %d: %w", seg.Len,
			seg.Addr, whose, seg.Device, driver.ErrBounds)
	}
	b, err := buffers.use(m, seg)
	mem.Own = b
	return err
}

// DropMemory implements files.Mover.
func (m *mover) DropMemory(mem *files.Memory) error {
	return buffers.unuse(m, mem.Own.(*buffer))
}

// Explain implements files.Mover.
func (m *mover) Explain(local, remote *files.Memory) string {
	text := "experimental: has met compat mode alone; " + m.facts.Mode + "; cuFile " +
		m.facts.Version
	if m.cfg.Way == WayBatch {
		text += fmt.Sprintf(" by %d threads with batches of %d", m.cfg.Threads, m.cfg.BatchMax)
	} else {
		text += fmt.Sprintf(" by %d threads, one request each", m.cfg.Threads)
	}
	if local != nil && local.File == nil {
		if b := local.Own.(*buffer); b.registered() {
			text += "; memory registered"
		} else {
			text += "; memory not registered (" + b.why + "), so that cuFile copies once more"
		}
	}
	if remote != nil && remote.File.Why != "" {
		text += "; the file has no O_DIRECT: " + remote.File.Why
	}
	if n := m.c.BatchesRefused(); n > 0 {
		text += fmt.Sprintf("; the library took less at a time than it was given, %d times", n)
	}
	if m.facts.Compat {
		text += "; whether the staged route is faster here is measured by sluice bench " +
			"--lane gpufile"
	}
	return text
}

// Close implements files.Mover.
func (m *mover) Close() (err error) {
	if m.c != nil {
		m.c.Close()
	}
	if m.heed != nil {
		err = m.heed.Close()
	}
	m.attended.Wait()
	if m.ends != nil {
		m.ends.Close()
	}
	return err
}
