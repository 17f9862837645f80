// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"math"
	"runtime"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// What the variants without a kernel take of pinned memory, whatever the Move: a ring, and room for
// a part of each list that lies in the card's memory.
const (
	slotBytes = 512 << 10
	ringBytes = gpu.Marks * slotBytes // 2 MiB
	listBytes = 128 << 10
	chunkMax  = listBytes / 8 // entries whose indices are looked at at a time
	// runsMax is how many runs go to the driver by one call.
	runsMax = 4096
	// stagersMax is how many threads gather at most where DeviceOptions do not say.
	stagersMax = 4
)

// mover is what the variants without a kernel need. A Device makes it when the first of
// them runs. It is guarded by the Device's mu.
type mover struct {
	dev    *Device
	copier *gpu.Copier
	twin   *Twin
	pinned *hostmem.Buffer // the ring, then the lists
	at     uint64          // of pinned, as the card sees it

	lists [2]Index // of the chunk: of the destination, of the source
	first uint64   // entry of the chunk

	dst, src, n [runsMax]uint64 // runs that are to be copied
	runs        int
	open        [PartsMax]run // which may become longer yet

	piece Move // that the twin performs
	parts [PartsMax]Part
}

type run struct{ dst, src, n uint64 }

func (d *Device) openMover() (*mover, error) {
	if d.mover != nil {
		return d.mover, nil
	}
	v := &mover{dev: d}
	threads := d.threads
	if threads == 0 {
		threads = max(1, min(stagersMax, runtime.GOMAXPROCS(0)/2))
	}
	var err error
	if v.twin, err = NewTwin(threads); err != nil {
		return nil, err
	}
	if v.pinned, err = hostmem.Alloc(ringBytes+2*listBytes, hostmem.Options{Purpose: "cuda-ring",
		Populate: true}); err != nil {
		v.close()
		return nil, err
	}
	if v.at, err = d.d.Pin(v.pinned.Bytes()); err != nil {
		v.close()
		return nil, err
	}
	if v.copier, err = d.d.OpenCopier(); err != nil {
		v.close()
		return nil, err
	}
	d.mover = v
	return v, nil
}

func (v *mover) close() {
	if v.copier != nil {
		v.copier.Close()
	}
	if v.at != 0 {
		_ = v.dev.d.Unpin(v.pinned.Bytes())
	}
	if v.pinned != nil {
		_ = v.pinned.Close()
	}
	_ = v.twin.Close()
}

// perform moves the entries by the launch's variant, waits for the end, and adds to the tally.
func (d *Device) perform(l *Launch, m *DeviceMove, a *args, t *tally) error {
	if l.Kernel != "" {
		return d.launch(l, a, t)
	}
	v, err := d.openMover()
	if err != nil {
		return err
	}
	v.runs, v.open = 0, [PartsMax]run{}
	for first := uint64(0); first < a.count && err == nil; {
		var n uint64
		if n, err = v.load(m, a, first); err == nil {
			err = v.step(l, m, a, n, t)
		}
		first += n
	}
	// Whatever failed: what was begun reads the ring, and writes the caller's memory.
	if waited := v.copier.Sync(); err == nil {
		err = waited
	}
	return err
}

// step moves the n entries of the chunk.
func (v *mover) step(l *Launch, m *DeviceMove, a *args, n uint64, t *tally) error {
	if l.Variant != VariantStaged {
		return v.copies(a, n, t)
	}
	if scatter, _ := m.stages(a); scatter {
		return v.scatter(m, a, n, t)
	}
	return v.gather(m, a, n, t)
}

// load makes the lists show the indices from an entry on, and says for how many.
func (v *mover) load(m *DeviceMove, a *args, first uint64) (n uint64, err error) {
	n = a.count - first
	for _, x := range [...]*DeviceIndex{&m.Dst, &m.Src} {
		if x.List.Memory != nil && x.List.Memory.host == nil {
			n = min(n, chunkMax)
		}
	}
	v.first = first
	v.lists = [2]Index{}
	if err := v.list(0, &m.Dst, a.dstIndex, n); err != nil {
		return n, err
	}
	return n, v.list(1, &m.Src, a.srcIndex, n)
}

func (v *mover) list(end int, x *DeviceIndex, at, n uint64) error {
	if x.List.Memory == nil {
		return nil
	}
	size := uint64(4)
	if x.Wide {
		size = 8
	}
	if x.List.Memory.host != nil {
		v.lists[end] = x.view()
		v.lists[end].skip(v.first)
		return nil
	}
	off := ringBytes + uint64(end)*listBytes
	dst, src, bytes := [1]uint64{v.at + off}, [1]uint64{at + v.first*size}, [1]uint64{n * size}
	if err := v.copier.Copy(dst[:], src[:], bytes[:]); err != nil {
		return err
	}
	v.lists[end] = asIndex(v.pinned.Bytes()[off:][:n*size], x.Wide)
	return v.copier.Sync()
}

// view is a list in pinned memory.
func (x *DeviceIndex) view() Index {
	return asIndex(x.List.Memory.host[x.List.Off:][:x.List.N], x.Wide)
}

func asIndex(mem []byte, wide bool) Index {
	if wide {
		return Index{U64: view64(mem)}
	}
	return Index{U32: view32(mem)}
}

func (x *Index) skip(n uint64) {
	if x.U64 != nil {
		x.U64 = x.U64[n:]
	} else {
		x.U32 = x.U32[n:]
	}
}

// at returns an index, and whether it says to skip.
func (x *Index) at(i uint64) (place uint64, skip bool) {
	switch {
	case x.U64 != nil:
		return x.U64[i], x.U64[i] == Skip64
	case x.U32 != nil:
		return uint64(x.U32[i]), x.U32[i] == Skip32
	}
	return i, false
}

// judge is that of gather.cu: where entry i of the chunk goes and comes from; counted if
// nowhere and there is a tally.
func (v *mover) judge(a *args, i uint64, t *tally) (dst, src uint64, moves bool) {
	dst, noDst := v.place(0, i)
	src, noSrc := v.place(1, i)
	switch {
	case !noDst && !noSrc && dst < a.dstPlaces && src < a.srcPlaces:
		return dst, src, true
	case t == nil:
	case noDst || noSrc:
		t.skipped++
	default:
		t.bad++
		t.firstBad = min(t.firstBad, v.first+i)
	}
	return 0, 0, false
}

func (v *mover) place(end int, i uint64) (place uint64, skip bool) {
	x := &v.lists[end]
	if x.U32 == nil && x.U64 == nil {
		return v.first + i, false
	}
	return x.at(i)
}

// copies has the copy engine move n entries of the chunk, neighbours at once.
func (v *mover) copies(a *args, n uint64, t *tally) error {
	for i := range n {
		dst, src, moves := v.judge(a, i, t)
		if !moves {
			continue
		}
		for k := range a.part[:a.parts] {
			p := &a.part[k]
			if err := v.add(k, p.dst+dst*p.dstStride, p.src+src*p.srcStride,
				uint64(p.entry)); err != nil {
				return err
			}
		}
	}
	return v.flush()
}

// add copies n bytes sometime, with those of the part before if they are neighbours.
func (v *mover) add(part int, dst, src, n uint64) error {
	r := &v.open[part]
	if r.n > 0 && dst == r.dst+r.n && src == r.src+r.n && r.n < math.MaxUint32 {
		r.n += n
		return nil
	}
	err := v.end(part)
	*r = run{dst, src, n}
	return err
}

// end puts the run of a part among those that are to be copied, and begins all of them when there
// is no room for more.
func (v *mover) end(part int) error {
	r := &v.open[part]
	if r.n == 0 {
		return nil
	}
	v.dst[v.runs], v.src[v.runs], v.n[v.runs] = r.dst, r.src, r.n
	r.n = 0
	if v.runs++; v.runs < runsMax {
		return nil
	}
	return v.begin()
}

func (v *mover) begin() error {
	n := v.runs
	v.runs = 0
	if n == 0 {
		return nil
	}
	return v.copier.Copy(v.dst[:n], v.src[:n], v.n[:n])
}

// flush begins all that was added.
func (v *mover) flush() error {
	for part := range v.open {
		if err := v.end(part); err != nil {
			return err
		}
	}
	return v.begin()
}
