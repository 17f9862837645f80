// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"
	"slices"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
)

// tallyRoom keeps the lists behind a tally at a multiple of 16.
const tallyRoom = (cuda.TallyBytes + 15) / 16 * 16

// checkPattern chooses how to move a pattern: with the gather kernel, with a gather by a CPU core
// and one copy, or with one copy of the copy engine for each run of bytes.
func (j *job) checkPattern(op driver.Op, p *driver.Pattern, s *scratch) error {
	if err := j.enter(op, p.LocalKey, p.RemoteKey); err != nil {
		return err
	}
	v := &j.pairs[0]
	if err := p.Check(v.local.seg.Len, v.remote.m.seg.Len); err != nil {
		return err
	}
	if p.Runs() > runsMax || p.Count > runsMax/p.Runs() { // a place has no room for so many indices
		return fmt.Errorf("pattern: %d entries of %d runs, at most %d runs: %w",
			p.Count, p.Runs(), runsMax, driver.ErrBounds)
	}
	if j.b.gates.count.Load() > 0 {
		if err := v.eachRun(p, s, func(_ int, d *driver.Desc) error {
			return j.gateOf(v, d)
		}); err != nil {
			return err
		}
	}
	switch {
	case v.kernelWhy(j.b, p) == "":
		return j.byKernel(op, v, p)
	case len(j.events) == 0 && v.processor(p):
		j.byProcessor(v, p)
		return nil
	}
	return v.eachRun(p, s, func(i int, d *driver.Desc) error {
		v.add(&s.pieces, op, d, i, true)
		return nil
	})
}

// eachRun calls f for each run of a pattern, with the number of its entry. It checks the bounds of
// each run, since a list may have changed since Pattern.Check.
func (v *pair) eachRun(p *driver.Pattern, s *scratch, f func(i int, d *driver.Desc) error) error {
	for i := range p.Count {
		s.runs = p.AppendDescs(s.runs[:0], i)
		for k := range s.runs {
			d := &s.runs[k]
			err := d.Check(v.local.seg.Len, v.remote.m.seg.Len)
			if err == nil {
				err = f(i, d)
			}
			if err != nil {
				return &driver.PieceError{Piece: i, Err: err}
			}
		}
	}
	return nil
}

// kernelWhy says why the gather kernel cannot move a pattern; empty: it can.
func (v *pair) kernelWhy(b *Backend, p *driver.Pattern) string {
	l, r := v.local, v.remote.m
	plain := p.Plain()
	switch {
	case !b.cfg.kernels():
		return "Config.Budget is zero"
	case !l.pinnedOrDevice() || !r.pinnedOrDevice():
		return "host memory is not pinned"
	case v.way == gpu.Any:
		return "two devices, or one that is not ours"
	case p.Run > entryMax:
		return "entries that long are for the copy engine"
	case plain && (p.Local.Stride == 0 || p.Remote.Stride == 0):
		return "all entries are one"
	case slices.Contains(p.Local.List, math.MaxUint32) ||
		slices.Contains(p.Remote.List, math.MaxUint32):
		return "the last index of 32 bits leaves an entry out"
	}
	shape := shapeOf(p, driver.Write,
		reachOf(&p.Local, l.base, l.seg.Len, 0), reachOf(&p.Remote, r.base, r.seg.Len, 0))
	if !shape.Takes() {
		return "lengths, strides and addresses must be multiples of 4, and no stride below an entry"
	}
	return ""
}

// shapeOf converts a pattern for the kernels.
func shapeOf(p *driver.Pattern, op driver.Op, local, remote cuda.Reach) cuda.Pattern {
	shape := cuda.Pattern{Dst: remote, Src: local, Entry: p.Run, Count: p.Count}
	if op == driver.Read {
		shape.Dst, shape.Src = local, remote
	}
	for i := range p.Loops {
		l := &p.Loops[i]
		shape.Loops[i] = cuda.Loop{N: l.N, Dst: l.Remote, Src: l.Local}
		if op == driver.Read {
			shape.Loops[i].Dst, shape.Loops[i].Src = l.Local, l.Remote
		}
	}
	return shape
}

// reachOf converts a side of a pattern, over n bytes of memory at an address of the device.
func reachOf(s *driver.Side, at, n, list uint64) cuda.Reach {
	return cuda.Reach{At: at + s.Base, Len: n - s.Base, Stride: s.Stride, List: list,
		Per: s.Per, First: s.First, Step: s.Step}
}

func (m *memory) pinnedOrDevice() bool { return m.dev != nil || m.pin.pinned() }

// byKernel fills in the launch. It copies the lists to memory from which the device reads them.
func (j *job) byKernel(op driver.Op, v *pair, p *driver.Pattern) error {
	place, err := j.dev.place()
	if err != nil {
		return err
	}
	j.place, j.call = place, "gather by kernel"
	used := tallyRoom
	list := func(indices []uint32) (at uint64) {
		if indices == nil {
			return 0
		}
		at = place.At + uint64(used)
		used += copy(place.Host[used:], bytesOf(indices))
		return at
	}
	cuda.TallyStart(place.Host)
	local, err := v.local.reach(j.dev, &p.Local, list(p.Local.List))
	if err != nil {
		return err
	}
	remote, err := v.remote.m.reach(j.dev, &p.Remote, list(p.Remote.List))
	if err != nil {
		return err
	}
	shape := shapeOf(p, op, local, remote)
	shape.Tally, shape.FarDst = place.At, v.way == gpu.Down
	l, kernel, n, err := j.dev.kernels.Launch(&shape, j.b.cfg.Budget, j.run.Args[:])
	if err != nil {
		return err
	}
	r := &j.run
	r.To, r.From, r.N = place.At, addressOf(place.Host), uint64(used)
	r.OwnAt = [2]uint64{v.local.base, v.remote.m.base}
	r.OwnLen = [2]uint64{v.local.deviceBytes(), v.remote.m.deviceBytes()}
	r.Kernel, r.Blocks, r.Threads, r.Shared, r.ArgsLen = uint32(kernel), l.Blocks, l.Threads,
		l.Shared, uint32(n)
	return nil
}

// deviceBytes is the device memory that the program could free while a kernel runs, which would
// make the device unusable for the process.
func (m *memory) deviceBytes() uint64 {
	if m.dev == nil {
		return 0
	}
	return m.seg.Len
}

// reach is a memory with its address on a device, for kernels.
func (m *memory) reach(d *device, s *driver.Side, list uint64) (cuda.Reach, error) {
	at := m.base
	if m.dev == nil {
		var err error
		if at, err = m.seenBy(d); err != nil {
			return cuda.Reach{}, err
		}
	}
	return reachOf(s, at, m.seg.Len, list), nil
}

// seenBy returns the address of pinned host memory on a device. The memory may belong to a peer's
// backend that has not opened this device.
func (m *memory) seenBy(d *device) (uint64, error) {
	for i, at := range m.at {
		if m.b.devices[i].ordinal == d.ordinal {
			return at, nil
		}
	}
	return m.hostAddress(d)
}

// processor reports whether a CPU core can gather a pattern so that one copy is enough: one side is
// host memory, and on the other the entries are contiguous in the memory of a device.
func (v *pair) processor(p *driver.Pattern) bool {
	if !p.Plain() || p.Run > stageHalf || v.way == gpu.Any || p.Count < 2 {
		return false
	}
	if v.local.dev == nil {
		return p.Remote.List == nil && p.Remote.Stride == p.Run
	}
	return v.remote.m.dev == nil && p.Local.List == nil && p.Local.Stride == p.Run
}

func (j *job) byProcessor(v *pair, p *driver.Pattern) {
	j.call = "gather by a processor"
	g := &j.gather
	*g = gpu.Entries{Entry: p.Run, Count: p.Count}
	if v.local.dev == nil {
		g.Host, g.Base, g.Stride, g.List, g.Dense = v.local.seg.Mem, p.Local.Base, p.Local.Stride,
			p.Local.List, v.remote.m.base+p.Remote.Base
	} else {
		g.Host, g.Base, g.Stride, g.List, g.Dense = v.remote.m.seg.Mem, p.Remote.Base,
			p.Remote.Stride, p.Remote.List, v.local.base+p.Local.Base
	}
	g.Up = v.way == gpu.Up
}

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	l, r := p.from.memories.At(localKey), p.remote(remoteKey)
	if l == nil || r == nil {
		return "no such memory"
	}
	if l.dev == nil && r.m.dev == nil {
		return "from dram to dram: another backend does that"
	}
	d := p.from.deviceOf(l, r.m)
	where := d.String()
	if p.far != nil {
		where += ", memory of another process mapped here"
	}
	return fmt.Sprintf("experimental: has met one card, an H100; %s; "+
		"descriptors by the copy engine, %s; small entries %s",
		where, pinning(l, r.m), p.from.entries(d, l, r.m))
}

// pinning says, for Explain, how the copy engine reaches host memory.
func pinning(list ...*memory) string {
	for _, m := range list {
		switch {
		case m.pin == nil:
		case m.pin.pinned():
			return "host memory pinned"
		default:
			return "host memory not pinned (" + m.pin.why + "), so that the driver copies " +
				"it once more"
		}
	}
	return "within devices"
}

// entries says, for Explain, how small entries move.
func (b *Backend) entries(d *device, l, r *memory) string {
	v := pair{local: l, remote: &remote{m: r}, way: d.way(l, r)}
	shape := driver.Pattern{Count: 2, Run: 16, Local: driver.Side{Stride: 16},
		Remote: driver.Side{Stride: 16}}
	switch why := v.kernelWhy(b, &shape); {
	case why == "":
		return fmt.Sprintf("by kernel (%v) within %d multiprocessors", d.kernels.Names(),
			b.cfg.Budget.SMs)
	case v.way == gpu.Any || l.dev != nil && r.dev != nil:
		return "one by one, no kernel: " + why
	default:
		return "gathered by a processor where the device's side is dense, else one by one, " +
			"no kernel: " + why
	}
}
