// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// cellsOf are all bytes of a memory but the last, as cells of 130, one behind the other.
func cellsOf(t *testing.T, p *place) digest.DeviceCells {
	t.Helper()
	k, err := digest.NewKey(digest.Seed{9}, "k", "bf16", 130)
	require.NoError(t, err)
	seg := p.space.Segment
	return digest.DeviceCells{Key: k,
		Memory: digest.DeviceMemory{Device: seg.Device, Addr: seg.Addr, Len: seg.Len},
		Cells: digest.Cells{At: driver.Side{Stride: 130}, Count: int(seg.Len / 130), Turn: 1,
			Outer: digest.Axis{N: 1}, Axis: digest.Axis{N: 1}}}
}

func (r *rig) sumOf(c digest.DeviceCells, content []byte) digest.Digest {
	r.t.Helper()
	sum, err := digest.Sum(content, &c.Cells, c.Key)
	require.NoError(r.t, err)
	return sum
}

// TestHBMSums: cells of two devices by one call, also while a thread of the program captures a
// graph.
func TestHBMSums(t *testing.T) {
	onStandIn(t) // a card has one device
	r := newRig(t, testConfig())
	first := r.memory(hbm, 10000)
	second, err := hbmOn(1, 5000)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, second.Free()) })
	other := &place{space: second}
	r.fill(other)
	list := []digest.DeviceCells{cellsOf(t, first), cellsOf(t, other), cellsOf(t, first)}
	want := r.sumOf(list[0], r.content(first))
	want.Add(r.sumOf(list[1], r.content(other)))
	want.Add(r.sumOf(list[2], r.content(first)))
	for range 2 {
		got, err := r.b.SumCells(list)
		require.NoError(t, err)
		require.Equal(t, want, got)
		libcuda.Set(t, "capture", 1)
	}
	libcuda.Put("capture", 0)
}

// TestHBMSumsRefuse names what it cannot digest.
func TestHBMSumsRefuse(t *testing.T) {
	r := newRig(t, testConfig())
	d := r.memory(hbm, 4096)
	good := cellsOf(t, d)
	for name, c := range map[string]struct {
		change func(c *digest.DeviceCells)
		is     error
	}{
		"no such device": {func(c *digest.DeviceCells) { c.Memory.Device = 7 },
			driver.ErrNotSupported},
		"host memory": {func(c *digest.DeviceCells) {
			c.Memory.Addr = r.memory(drivertest.HostMemory, 4096).m.base
		}, driver.ErrBounds},
		"outside": {func(c *digest.DeviceCells) { c.Cells.At.Base = 67 }, driver.ErrBounds},
	} {
		bad := good
		c.change(&bad)
		_, err := r.b.SumCells([]digest.DeviceCells{good, bad})
		require.ErrorIs(t, err, c.is, name)
		require.ErrorContains(t, err, "digest device memory", name)
	}
	got, err := r.b.SumCells([]digest.DeviceCells{good})
	require.NoError(t, err)
	require.Equal(t, r.sumOf(good, r.content(d)), got)
	require.NoError(t, r.b.Close())
	_, err = r.b.SumCells([]digest.DeviceCells{good})
	require.ErrorIs(t, err, driver.ErrClosed)

	cfg := testConfig()
	cfg.Budget = cuda.Budget{}
	none := newRig(t, cfg)
	_, err = none.b.SumCells([]digest.DeviceCells{good})
	require.ErrorIs(t, err, driver.ErrNotSupported)
	require.ErrorContains(t, err, "Config.Budget")
}

// summed is what a sum in a goroutine of its own has said.
type summed struct {
	sum digest.Digest
	err error
}

func (r *rig) sums(c ...digest.DeviceCells) chan summed {
	out := make(chan summed, 1)
	go func() {
		sum, err := r.b.SumCells(c)
		out <- summed{sum, err}
	}()
	return out
}

// sumsAt begins a sum and returns when it has come to a spot.
func (r *rig) sumsAt(where string, c ...digest.DeviceCells) chan summed {
	r.t.Helper()
	there := make(chan struct{})
	testpoint.First(where, func() { close(there) })
	defer testpoint.First(where, nil)
	out := r.sums(c...)
	select {
	case <-there:
	case a := <-out:
		require.FailNow(r.t, "a sum has ended", "%+v", a)
	case <-time.After(limit):
		require.FailNow(r.t, "a sum is late")
	}
	return out
}

// gated has memory wait for the event of a stream. A test that holds it releases it in a defer:
// Close waits for it.
func (r *rig) gated(p *producer, seg driver.Segment) {
	r.t.Helper()
	require.NoError(r.t, r.b.StartAfter(seg, p.event))
	r.t.Cleanup(p.close)
}

// TestHBMSumsWaitForEvents before the cells, and for no others; a sum that waits holds up no other.
func TestHBMSumsWaitForEvents(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	layers, source := r.memory(hbm, 2*4096), r.memory(hbm, 4096)
	blocked := newProducer(t)
	second, err := layers.space.Segment.Slice(4096, 4096, [16]byte{})
	require.NoError(t, err)
	r.gated(blocked, second)
	defer r.release()
	all := cellsOf(t, layers)
	var list [2]digest.DeviceCells
	for i := range list {
		list[i] = all
		list[i].Cells.Count = 4
		list[i].Cells.At = driver.Side{Base: 16, Stride: 400, List: []uint32{3, 0, 7, 1}}
	}
	list[1].Cells.At.Base += 4096
	r.hold(blocked)
	require.NoError(t, blocked.Copy(layers.m.base+4096, source.m.base, 4096))
	require.NoError(t, blocked.Record(blocked.event))
	late := r.sumsAt("cuda: behind", list[1])
	select {
	case a := <-r.sums(list[0]):
		require.NoError(t, a.err)
		require.Equal(t, r.sumOf(list[0], r.content(layers)), a.sum)
	case <-time.After(limit):
		require.FailNow(t, "a sum waits for an event of others")
	}
	select {
	case a := <-late:
		t.Errorf("a sum (%+v) before the event behind its cells", a)
		late <- a
	case <-time.After(50 * time.Millisecond):
	}
	r.release()
	a := <-late
	require.NoError(t, a.err)
	require.Equal(t, r.sumOf(list[1], r.content(layers)), a.sum)
}

// TestHBMSumsWaitForOneStep: what an event had recorded at the call, and not the next step.
func TestHBMSumsWaitForOneStep(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	d := r.memory(hbm, 4096)
	p := newProducer(t)
	r.gated(p, d.space.Segment)
	defer r.release()
	r.hold(p)
	testpoint.First("cuda: behind", func() {
		r.release()
		require.NoError(t, p.Sync())
		r.hold(p) // the next step
	})
	defer testpoint.First("cuda: behind", nil)
	sum, err := r.b.SumCells([]digest.DeviceCells{cellsOf(t, d)})
	require.NoError(t, err)
	require.Equal(t, uint32(1), libcuda.Get("hold"))
	r.release()
	require.Equal(t, r.sumOf(cellsOf(t, d), r.content(d)), sum)
}

// TestHBMSumsGiveUp where the event does not come, or other memory is still put there; also under a
// part of what they read.
func TestHBMSumsGiveUp(t *testing.T) {
	onStandIn(t)
	cfg := peersConfig()
	cfg.SumTimeout, cfg.Gated = 20*time.Millisecond, 1
	r := newRig(t, cfg)
	late, free := r.memory(hbm, 4096), r.memory(sharedHBM, 4096)
	p := newProducer(t)
	r.gated(p, late.space.Segment)
	defer r.release()
	r.hold(p)
	for range 2 { // the second finds no stream
		_, err := r.b.SumCells([]digest.DeviceCells{cellsOf(t, late)})
		require.ErrorIs(t, err, driver.ErrTimeout)
		require.ErrorContains(t, err, "Config.SumTimeout")
	}
	free.m.block.moving.Store(true)
	c := cellsOf(t, free)
	_, err := r.b.SumCells([]digest.DeviceCells{c})
	require.ErrorIs(t, err, driver.ErrTimeout)
	c.Memory.Addr--
	_, err = r.b.SumCells([]digest.DeviceCells{c})
	require.ErrorIs(t, err, driver.ErrTimeout, "memory that begins outside")
	free.m.block.moving.Store(false)
	r.release()
	require.NoError(t, p.Sync())
	r.b.cfg.SumTimeout = limit
	for _, d := range []*place{late, free} {
		sum, err := r.b.SumCells([]digest.DeviceCells{cellsOf(t, d)})
		require.NoError(t, err)
		require.Equal(t, r.sumOf(cellsOf(t, d), r.content(d)), sum)
	}
}

// TestHBMSumsEndWithTheBackend, without the event.
func TestHBMSumsEndWithTheBackend(t *testing.T) {
	onStandIn(t)
	cfg := testConfig()
	cfg.SumTimeout = time.Hour
	r := newRig(t, cfg)
	d := r.memory(hbm, 4096)
	p := newProducer(t)
	r.gated(p, d.space.Segment)
	defer r.release()
	r.hold(p)
	late := r.sumsAt("cuda: behind", cellsOf(t, d))
	closed := make(chan error, 1)
	go func() { closed <- r.b.Close() }()
	require.ErrorIs(t, (<-late).err, driver.ErrClosed)
	r.release()
	require.NoError(t, <-closed)
}

// TestHBMSumsOfCapturedStreams: nothing is put into the program's graph.
func TestHBMSumsOfCapturedStreams(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	d := r.memory(hbm, 4096)
	p := newProducer(t)
	r.gated(p, d.space.Segment)
	defer r.release()
	require.NoError(t, p.Record(p.event))
	c := []digest.DeviceCells{cellsOf(t, d)}
	_, err := r.b.SumCells(c)
	require.NoError(t, err)
	launches := libcuda.Get("launches")
	libcuda.Set(t, "capture", 3)
	_, err = r.b.SumCells(c)
	var said *gpu.Error
	require.ErrorAs(t, err, &said)
	require.Equal(t, 907, said.Result)
	require.Equal(t, launches, libcuda.Get("launches"))
	libcuda.Put("capture", 0)
	got, err := r.b.SumCells(c)
	require.NoError(t, err)
	require.Equal(t, r.sumOf(c[0], r.content(d)), got)
}

// TestHBMSumsAndRevokes: while other memory goes under the addresses, no sum begins; while a sum is
// under way, none goes, but it goes while a sum waits for its event.
func TestHBMSumsAndRevokes(t *testing.T) {
	onStandIn(t)
	r := newRig(t, peersConfig())
	d := r.memory(sharedHBM, 4096)
	o := d.m.block
	require.NotNil(t, o)
	p := newProducer(t)
	r.gated(p, d.space.Segment)
	defer r.release()
	r.hold(p)
	ended := r.sumsAt("cuda: behind", cellsOf(t, d))
	require.Zero(t, o.users.Load())
	users := make(chan int64, 1)
	testpoint.First("cuda: held", func() { users <- o.users.Load() })
	defer testpoint.First("cuda: held", nil)
	r.release()
	require.NoError(t, (<-ended).err)
	require.Equal(t, int64(1), <-users)
	require.Zero(t, o.users.Load())
	o.moving.Store(true)
	ended = r.sums(cellsOf(t, d))
	select {
	case a := <-ended:
		t.Errorf("a sum while memory moves: %+v", a)
		ended <- a
	case <-time.After(50 * time.Millisecond):
	}
	o.moving.Store(false)
	require.NoError(t, (<-ended).err)
}

// TestHBMSumsAndFree: memory goes when the sum that reads it has ended; a later sum finds none.
func TestHBMSumsAndFree(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	space, err := sharedHBM(4096)
	require.NoError(t, err)
	p := &place{space: space}
	r.fill(p)
	c := []digest.DeviceCells{cellsOf(t, p)}
	want := r.sumOf(c[0], r.content(p))
	freed := make(chan error, 1)
	testpoint.First("cuda: held", func() {
		go func() { freed <- space.Free() }()
		for end := time.Now().Add(limit); blocks.find(c[0].Memory.Addr, 1) != nil; {
			require.True(t, time.Now().Before(end), "nobody frees")
			time.Sleep(time.Millisecond)
		}
		select {
		case err := <-freed:
			t.Errorf("memory was freed (%v) under a sum", err)
			freed <- err
		case <-time.After(50 * time.Millisecond):
		}
	})
	defer testpoint.First("cuda: held", nil)
	got, err := r.b.SumCells(c)
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.NoError(t, <-freed)
	_, err = r.b.SumCells(c)
	require.ErrorIs(t, err, driver.ErrBounds)
}

// TestBlocksUnder finds all that a range has a byte of.
func TestBlocksUnder(t *testing.T) {
	of := func(at, n uint64) *ownBlock { return &ownBlock{block: &gpu.Block{At: at, Len: n}} }
	a, b, c := of(100, 50), of(150, 50), of(300, 10)
	table := blockTable{list: []*ownBlock{a, b, c}}
	for _, w := range []struct {
		at, n uint64
		want  []*ownBlock
	}{
		{0, 100, nil}, {0, 101, []*ownBlock{a}}, {149, 1, []*ownBlock{a}},
		{149, 2, []*ownBlock{a, b}}, {150, 50, []*ownBlock{b}}, {200, 100, nil},
		{199, 102, []*ownBlock{b, c}}, {90, 1 << 63, []*ownBlock{a, b, c}}, {310, 5, nil},
		{309, math.MaxUint64, []*ownBlock{c}}, {120, 0, nil},
	} {
		require.Equal(t, w.want, append([]*ownBlock(nil), table.under(w.at, w.n)...), "%+v", w)
	}
}

// TestHBMSumsAllocateNothing of the device once the backend is open, not even the first: a program
// that captures a graph forbids it.
func TestHBMSumsAllocateNothing(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	c := []digest.DeviceCells{cellsOf(t, r.memory(hbm, 4096))}
	has := func() (n [4]uint32) {
		for i, w := range []string{"allocations", "host_allocations",
			"pins", "contexts"} {
			n[i] = libcuda.Get(w)
		}
		return n
	}
	before := has()
	_, err := r.b.SumCells(c)
	require.NoError(t, err)
	require.Equal(t, before, has())
}

// TestHBMSumsWithoutRoom: New opens the backend all the same, and SumCells says what is missing.
func TestHBMSumsWithoutRoom(t *testing.T) {
	onStandIn(t)
	libcuda.Set(t, "pin_result", 2)
	r := newRig(t, testConfig())
	libcuda.Put("pin_result", 0)
	_, err := r.b.SumCells([]digest.DeviceCells{cellsOf(t, r.memory(hbm, 4096))})
	var said *gpu.Error
	require.ErrorAs(t, err, &said)
	require.ErrorContains(t, err, "open a summer")
}
