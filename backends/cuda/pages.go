// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"math"
	"slices"

	"github.com/sluicehq/sluice/csrc"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
)

// tallyRoom keeps the lists behind a tally at a multiple of 16.
const tallyRoom = (cuda.TallyBytes + 15) / 16 * 16

// checkPattern chooses who moves a pattern: a kernel, a processor with one copy, or
// the copy engine with one for each run of entries.
func (j *job) checkPattern(op driver.Op, p *driver.Pattern, pieces *[]csrc.CUDAPiece) error {
	if err := j.look(op, p.LocalKey, p.RemoteKey); err != nil {
		return err
	}
	v := &j.views[0]
	if err := p.Check(v.local.seg.Len, v.remote.m.seg.Len); err != nil {
		return err
	}
	if j.b.gates.count.Load() > 0 {
		if err := j.gatePattern(v, p); err != nil {
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
	for i := range p.Count {
		d := p.Desc(i) // the list may have changed since Pattern.Check
		if err := d.Check(v.local.seg.Len, v.remote.m.seg.Len); err != nil {
			return &driver.PieceError{Piece: i, Err: err}
		}
		v.add(pieces, op, &d, i, true)
	}
	return nil
}

// gatePattern looks at each entry, once there are gates at all.
func (j *job) gatePattern(v *view, p *driver.Pattern) error {
	for i := range p.Count {
		d := p.Desc(i)
		if err := j.gateOf(v, &d); err != nil {
			return err
		}
	}
	return nil
}

// kernelWhy says why the gather kernel cannot take a pattern; empty: it can.
func (v *view) kernelWhy(b *Backend, p *driver.Pattern) string {
	l, r := v.local, v.remote.m
	switch {
	case !b.cfg.kernels():
		return "Config.Budget is zero"
	case !l.pinnedOrDevice() || !r.pinnedOrDevice():
		return "host memory is not pinned"
	case v.way == csrc.CUDAAny:
		return "two devices, or one that is not ours"
	case p.Run > entryMax:
		return "entries that long are for the copy engine"
	case p.Local.Stride == 0 || p.Remote.Stride == 0:
		return "all entries are one"
	case slices.Contains(p.Local.List, math.MaxUint32) || slices.Contains(p.Remote.List, math.MaxUint32):
		return "the last index of 32 bits leaves an entry out"
	}
	shape := cuda.Pattern{Entry: p.Run, Count: p.Count,
		Dst: cuda.Reach{At: l.base + p.Local.Base, Len: p.Run, Stride: p.Local.Stride},
		Src: cuda.Reach{At: r.base + p.Remote.Base, Len: p.Run, Stride: p.Remote.Stride}}
	if !shape.Takes() {
		return "lengths, strides and addresses must be multiples of 4"
	}
	return ""
}

func (m *memory) pinnedOrDevice() bool { return m.dev != nil || m.pin.pinned() }

// byKernel fills in the launch, with lists in memory that the device reads from.
func (j *job) byKernel(op driver.Op, v *view, p *driver.Pattern) error {
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
	local, err := v.local.reach(j.dev, p.Local.Base, p.Local.Stride, list(p.Local.List))
	if err != nil {
		return err
	}
	remote, err := v.remote.m.reach(j.dev, p.Remote.Base, p.Remote.Stride, list(p.Remote.List))
	if err != nil {
		return err
	}
	shape := cuda.Pattern{Dst: remote, Src: local, Entry: p.Run, Count: p.Count, Tally: place.At, FarDst: v.way == csrc.CUDADown}
	if op == driver.Read {
		shape.Dst, shape.Src = local, remote
	}
	l, kernel, n, err := j.dev.kernels.Launch(&shape, j.b.cfg.Budget, j.run.Args[:])
	if err != nil {
		return err
	}
	r := &j.run
	r.To, r.From, r.N = place.At, addressOf(place.Host), uint64(used)
	r.OwnAt = [2]uint64{v.local.base, v.remote.m.base}
	r.OwnLen = [2]uint64{v.local.deviceBytes(), v.remote.m.deviceBytes()}
	r.Kernel, r.Blocks, r.Threads, r.Shared, r.ArgsLen = uint32(kernel), l.Blocks, l.Threads, l.Shared, uint32(n)
	return nil
}

// deviceBytes is what of a memory may be freed under us and end the use of the device.
func (m *memory) deviceBytes() uint64 {
	if m.dev == nil {
		return 0
	}
	return m.seg.Len
}

// reach is a memory as kernels of a device see it.
func (m *memory) reach(d *device, base, stride, list uint64) (cuda.Reach, error) {
	at := m.base
	if m.dev == nil {
		var err error
		if at, err = m.seenBy(d); err != nil {
			return cuda.Reach{}, err
		}
	}
	return cuda.Reach{At: at + base, Len: m.seg.Len - base, Stride: stride, List: list}, nil
}

// seenBy is where a device sees host memory. A backend of the peer may know it that has no such device.
func (m *memory) seenBy(d *device) (uint64, error) {
	for i, at := range m.at {
		if m.b.devices[i].ordinal == d.ordinal {
			return at, nil
		}
	}
	return m.hostAddress(d)
}

// processor reports whether a processor can gather a pattern for one copy: host memory on the
// one side, and entries one behind the other on a device on the other.
func (v *view) processor(p *driver.Pattern) bool {
	if p.Run > stageHalf || v.way == csrc.CUDAAny || p.Count < 2 {
		return false
	}
	if v.local.dev == nil {
		return p.Remote.List == nil && p.Remote.Stride == p.Run
	}
	return v.remote.m.dev == nil && p.Local.List == nil && p.Local.Stride == p.Run
}

func (j *job) byProcessor(v *view, p *driver.Pattern) {
	j.call = "gather by a processor"
	g := &j.gather
	*g = csrc.CUDAEntries{Entry: p.Run, Count: p.Count}
	if v.local.dev == nil {
		g.Host, g.Base, g.Stride, g.List, g.Dense = v.local.seg.Mem, p.Local.Base, p.Local.Stride, p.Local.List, v.remote.m.base+p.Remote.Base
	} else {
		g.Host, g.Base, g.Stride, g.List, g.Dense = v.remote.m.seg.Mem, p.Remote.Base, p.Remote.Stride, p.Remote.List, v.local.base+p.Local.Base
	}
	g.Up = v.way == csrc.CUDAUp
}
