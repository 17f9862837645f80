// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/allocs"
)

// inMemory is onDevice with the lists in pinned memory, too, where they are asked for there.
func inMemory(t *testing.T, d *Device, m *Move, hostDst, hostLists bool) *DeviceMove {
	t.Helper()
	dm := onDevice(t, d, m, hostDst)
	for _, x := range []*DeviceIndex{&dm.Dst, &dm.Src} {
		if x.List.Memory == nil || !hostLists {
			continue
		}
		list := make([]byte, x.List.N)
		require.NoError(t, x.List.Memory.ReadAt(list, 0))
		x.List = span(memory(t, d, true, list), len(list))
	}
	return dm
}

// sameAsTwin runs both and compares the tallies and all of the destinations.
func sameAsTwin(t *testing.T, d *Device, dm *DeviceMove, m *Move, b Budget, only string) {
	t.Helper()
	want, wantErr := Run(m)
	got, l, err := d.Run(dm, b, only)
	if got != want || err != wantErr || only != "" && l.Variant != only {
		t.Fatalf("%s: %+v, %v by %q, want %+v, %v", only, got, err, l.Variant, want, wantErr)
	}
	for k, p := range m.Parts {
		// All has landed when Run returns, not when somebody waits for more.
		if to := dm.Parts[k].Dst; to.Memory.host != nil &&
			!bytes.Equal(to.Memory.host[to.Off:][:to.N], p.Dst) {
			t.Fatalf("%s: part %d of %d entries has not landed", only, k, m.Count)
		}
		have := make([]byte, len(p.Dst))
		if err := dm.Parts[k].Dst.Memory.ReadAt(have, 0); err != nil || !bytes.Equal(have, p.Dst) {
			t.Fatalf("%s: part %d of %d entries differs from the twin's, %v", only, k, m.Count, err)
		}
	}
}

// TestVariantsEqualTheTwin: those without a kernel, with lists of all kinds on either side.
func TestVariantsEqualTheTwin(t *testing.T) {
	d := device(t, "90")
	rng := rand.New(rand.NewPCG(21, 22))
	for _, sizes := range [][]int{{656}, {132}, {576}, {584}, {1152}, {656, 132}, {132, 656}} {
		for kinds := range 9 {
			for _, way := range []struct{ hostDst, hostLists bool }{{false, true}, {false, false},
				{true, true}, {true, false}} {
				for _, pad := range []int{0, 16} {
					m := draw(rng, sizes, pad, 60, kinds/3, kinds%3)
					sameAsTwin(t, d, inMemory(t, d, m, way.hostDst, way.hostLists), m, Budget{},
						VariantLoop)
				}
			}
		}
	}
}

// stagedMove has a run without gaps on the card's side.
func stagedMove(rng *rand.Rand, sizes []int, pad, n, kind int, scatter bool) *Move {
	m := draw(rng, sizes, pad, n, 0, kind)
	if scatter {
		m.Dst, m.Src = m.Src, m.Dst
	}
	for k := range m.Parts {
		p := &m.Parts[k]
		if scatter {
			p.SrcStride = 0
		} else {
			p.DstStride = 0
		}
	}
	return m
}

// TestStagedEqualsTheTwin over several rounds of the ring, and with a card's memory that ends
// early.
func TestStagedEqualsTheTwin(t *testing.T) {
	d := device(t, "90")
	rng := rand.New(rand.NewPCG(23, 24))
	for _, c := range []struct {
		sizes []int
		pad   int
		n     int
	}{{[]int{656}, 0, 40}, {[]int{656}, 112, 7000}, {[]int{584}, 8, 300},
		{[]int{656, 132}, 4, 4000}, {[]int{4}, 0, 40000}, {[]int{200000}, 0, 13}} {
		for kind := range 3 {
			for _, scatter := range []bool{false, true} {
				for _, hostLists := range []bool{false, true} {
					m := stagedMove(rng, c.sizes, c.pad, c.n, kind, scatter)
					if kind == 1 {
						for k := range m.Parts { // the last entries have no place on the card
							p := &m.Parts[k]
							if scatter {
								p.Src = p.Src[:(c.n-3)*c.sizes[k]]
							} else {
								p.Dst = p.Dst[:(c.n-3)*c.sizes[k]]
							}
						}
					}
					sameAsTwin(t, d, inMemory(t, d, m, scatter, hostLists), m, Budget{},
						VariantStaged)
				}
			}
		}
	}
}

// TestRunsAreMerged: neighbours go to the copy engine as one.
func TestRunsAreMerged(t *testing.T) {
	d := device(t, "90")
	v, err := d.openMover()
	require.NoError(t, err)
	v.lists = [2]Index{1: {U32: []uint32{7, 8, 9, Skip32, 3, 4, 9}}}
	a := args{parts: 2, count: 7, dstPlaces: 100, srcPlaces: 100}
	a.part[0] = argsPart{dst: 1 << 20, src: 2 << 20, dstStride: 64, srcStride: 64, entry: 64}
	a.part[1] = argsPart{dst: 3 << 20, src: 4 << 20, dstStride: 16, srcStride: 16, entry: 16}
	sum := clean
	for i := range a.count {
		dst, src, moves := v.judge(&a, i, &sum)
		for k := range a.part {
			p := &a.part[k]
			if moves {
				require.NoError(t, v.add(k, p.dst+dst*p.dstStride, p.src+src*p.srcStride,
					uint64(p.entry)))
			}
		}
	}
	for k := range a.part {
		require.NoError(t, v.end(k))
	}
	if want := []uint64{192, 48, 128, 32, 64, 16}; !slices.Equal(v.n[:v.runs], want) ||
		sum.skipped != 1 {
		t.Errorf("runs of %v bytes, want %v", v.n[:v.runs], want)
	}
	// What a Move that failed left behind is no part of the next.
	m := draw(rand.New(rand.NewPCG(2, 2)), []int{656}, 0, 30, 0, 1)
	sameAsTwin(t, d, inMemory(t, d, m, false, true), m, Budget{}, VariantLoop)
}

// TestListsByChunks: lists in the card's memory are read by parts, beside one that is not; entries
// are counted by where they are in all of it.
func TestListsByChunks(t *testing.T) {
	const n = chunkMax + 5000
	d := device(t, "90")
	rng := rand.New(rand.NewPCG(8, 9))
	m := draw(rng, []int{16}, 0, n, 1, 2)
	for _, hostList := range []bool{false, true} {
		dm := onDevice(t, d, m, hostList)
		x := &dm.Dst
		list := make([]byte, x.List.N)
		require.NoError(t, x.List.Memory.ReadAt(list, 0))
		x.List = span(memory(t, d, true, list), len(list))
		sameAsTwin(t, d, dm, m, Budget{}, VariantLoop)
	}
	for _, scatter := range []bool{false, true} {
		m := stagedMove(rng, []int{16}, 0, n, 0, scatter)
		list := make([]uint32, n)
		for i := range list {
			list[i] = uint32(n - 1 - i)
		}
		list[n-7] = n + 9
		if scatter {
			m.Dst = Index{U32: list}
		} else {
			m.Src = Index{U32: list}
		}
		dm := inMemory(t, d, m, scatter, false)
		sameAsTwin(t, d, dm, m, Budget{}, VariantStaged)
		if got, _, err := d.Run(dm, Budget{}, VariantStaged); err != driver.ErrBounds ||
			got.FirstBad != n-7 {
			t.Errorf("%+v, %v", got, err)
		}
	}
}

// TestRunsDecide whether the copy engine is worth a measurement.
func TestRunsDecide(t *testing.T) {
	d := device(t, "90")
	const n = 640
	inRuns := func(run uint32) Index {
		var x Index
		for i := range uint32(n) {
			x.U32 = append(x.U32, (n/run-1-i/run)*run+i%run)
		}
		return x
	}
	for _, c := range []struct {
		name        string
		list        Index
		hostList    bool
		pad         int
		least, most uint64 // bytes of a run
		loop        string // why it is not measured
	}{
		{"none", Index{}, true, 0, n * 656, n * 656, ""},
		{"apart", inRuns(1), true, 0, 656, 656, "too short"},
		{"runs of 64", inRuns(64), true, 0, 8 * 656, n * 656, ""},
		{"runs of 2", inRuns(2), true, 0, 656, 4 * 656, "too short"},
		{"gaps", inRuns(64), true, 16, 656, 656, "too short"},
		{"on the card", inRuns(64), false, 0, 0, 0, "not known"},
	} {
		m := draw(rand.New(rand.NewPCG(1, 1)), []int{656}, c.pad, n, 0, 0)
		m.Src = c.list
		dm := inMemory(t, d, m, false, c.hostList)
		var a args
		require.NoError(t, dm.fill(&a, d))
		if run := dm.runBytes(&a); run < c.least || run > c.most {
			t.Errorf("%s: runs of %d bytes, want %d to %d", c.name, run, c.least, c.most)
		}
		choice, err := d.Explain(dm, Budget{SMs: 1}, "")
		require.NoError(t, err)
		for _, p := range choice.Candidates {
			if p.Variant == VariantLoop && !onCard() && (!strings.Contains(p.Reason, c.loop) ||
				(c.loop == "") != (p.GBps > 0)) {
				t.Errorf("%s: %+v, want %q", c.name, p, c.loop)
			}
		}
	}
}

// TestMeasuredByTheFirstEntries, however many there are.
func TestMeasuredByTheFirstEntries(t *testing.T) {
	d := device(t, "90")
	m := draw(rand.New(rand.NewPCG(1, 2)), []int{16}, 0, measuredMax+100, 0, 1)
	dm := onDevice(t, d, m, false)
	before := bytes.Clone(m.Parts[0].Dst)
	c, err := d.Explain(dm, Budget{}, "")
	if err != nil || !strings.Contains(c.Why, "measured") {
		t.Fatalf("%s, %v", c.String(), err)
	}
	have := make([]byte, len(before))
	require.NoError(t, dm.Parts[0].Dst.Memory.ReadAt(have, 0))
	if bytes.Equal(have[:16*measuredMax], before[:16*measuredMax]) ||
		!bytes.Equal(have[16*measuredMax:], before[16*measuredMax:]) {
		t.Error("other entries than the first moved")
	}
}

// TestKindsOfMoves: what one choice is not right for.
func TestKindsOfMoves(t *testing.T) {
	d := device(t, "90")
	rng := rand.New(rand.NewPCG(3, 2))
	seen := map[class]string{}
	for name, m := range map[string]*DeviceMove{
		"plain":        onDevice(t, d, draw(rng, []int{656}, 0, 100, 0, 1), false),
		"to the host":  onDevice(t, d, draw(rng, []int{656}, 0, 100, 0, 1), true),
		"scatter":      onDevice(t, d, draw(rng, []int{656}, 0, 100, 1, 0), false),
		"wide":         onDevice(t, d, draw(rng, []int{656}, 0, 100, 0, 2), false),
		"wide scatter": onDevice(t, d, draw(rng, []int{656}, 0, 100, 2, 0), false),
		"many":         onDevice(t, d, draw(rng, []int{656}, 0, 300, 0, 1), false),
		"other entry":  onDevice(t, d, draw(rng, []int{640}, 0, 100, 0, 1), false),
		"pair":         onDevice(t, d, draw(rng, []int{656, 132}, 0, 100, 0, 1), false),
		"list at hand": inMemory(t, d, draw(rng, []int{656}, 0, 100, 0, 1), false, true),
		"odd stride":   onDevice(t, d, draw(rng, []int{656}, 8, 100, 0, 1), false),
	} {
		var a args
		require.NoError(t, m.fill(&a, d))
		k := m.class(&a, Budget{SMs: 1}, m.runBytes(&a))
		if other, there := seen[k]; there {
			t.Errorf("%s and %s are of one kind", name, other)
		}
		seen[k] = name
	}
}

func TestTheFastestIsTaken(t *testing.T) {
	c := Choice{Variant: VariantAsync, Candidates: []Candidate{{Variant: VariantAsync, GBps: 41},
		{Variant: VariantRows, GBps: 46}, {Variant: VariantLoop, GBps: 2}}}
	if c.take(); c.Variant != VariantRows {
		t.Errorf("%s was taken", c.Variant)
	}
}

// TestChoiceIsMeasuredOnce for a kind of Moves, says what it knows of all variants, and is kept.
func TestChoiceIsMeasuredOnce(t *testing.T) {
	d := device(t, "90")
	rng := rand.New(rand.NewPCG(5, 5))
	dm := inMemory(t, d, draw(rng, []int{656}, 0, 200, 0, 1), false, true)
	c, err := d.Explain(dm, Budget{SMs: 2}, "")
	require.NoError(t, err)
	if len(c.Candidates) != len(Variants()) || !onCard() &&
		(!strings.Contains(c.Why, "measured: async") ||
			!strings.Contains(c.Why, "staged: for a budget of no multiprocessor")) {
		t.Errorf("%s", c.String())
	}
	best := slices.MaxFunc(c.Candidates, func(a, b Candidate) int {
		return int(1e6*a.GBps - 1e6*b.GBps)
	})
	if best.Variant != c.Variant || best.GBps <= 0 {
		t.Errorf("%s was taken of %+v", c.Variant, c.Candidates)
	}
	if _, l, err := d.Run(dm, Budget{SMs: 2}, ""); err != nil && err != driver.ErrBounds ||
		l.Why != c.Why || l.Variant != c.Variant {
		t.Errorf("%+v, %v after %s", l, err, c.String())
	}
	if len(d.choices) != 1 {
		t.Errorf("%d choices of one kind", len(d.choices))
	}
	if _, err := d.Explain(dm, Budget{SMs: 1}, ""); err != nil || len(d.choices) != 2 {
		t.Errorf("%d choices of two budgets, %v", len(d.choices), err)
	}
	if c, err := d.Explain(dm, Budget{SMs: 2}, VariantRows); err != nil ||
		c.Variant != VariantRows || c.Why != "asked for" {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestChoiceOfMovesThatSkip: there is nothing to measure by.
func TestChoiceOfMovesThatSkip(t *testing.T) {
	d := device(t, "90")
	m := &Move{Count: 2, Src: Index{U32: []uint32{Skip32, 900}},
		Parts: []Part{{Entry: 656, Dst: make([]byte, 2*656), Src: make([]byte, 2*656)}}}
	got, l, err := d.Run(onDevice(t, d, m, false), Budget{SMs: 1}, "")
	if err != driver.ErrBounds || got != (Tally{Skipped: 1, Bad: 1, FirstBad: 1}) ||
		!onCard() && !strings.Contains(l.Why, "nothing is measured") {
		t.Errorf("%+v, %+v, %v", got, l, err)
	}
	if len(d.choices) != 0 {
		t.Error("a choice without a measurement is kept")
	}
	m.Count = 0
	if got, l, err := d.Run(onDevice(t, d, m, false), Budget{SMs: 1}, ""); err != nil ||
		got != (Tally{}) || l.Variant == "" {
		t.Errorf("%+v, %+v, %v", got, l, err)
	}
}

func TestChoicesAreBounded(t *testing.T) {
	d := device(t, "90")
	for i := range choicesMax {
		d.choices[class{count: uint8(i), run: 99}] = &Choice{}
	}
	dm := onDevice(t, d, draw(rand.New(rand.NewPCG(3, 3)), []int{656}, 0, 20, 0, 0), false)
	if _, _, err := d.Run(dm, Budget{SMs: 1}, ""); err != nil || len(d.choices) != choicesMax {
		t.Errorf("%d choices, %v", len(d.choices), err)
	}
}

// TestNoMultiprocessor: CPU and copy engine do the work, never a kernel.
func TestNoMultiprocessor(t *testing.T) {
	d := device(t, "90")
	rng := rand.New(rand.NewPCG(9, 9))
	m := stagedMove(rng, []int{656}, 0, 500, 1, false)
	dm := inMemory(t, d, m, false, true)
	sameAsTwin(t, d, dm, m, Budget{}, "")
	c, err := d.Explain(dm, Budget{}, "")
	if err != nil || kernelOf(c.Variant) != "" ||
		!strings.Contains(c.Why, "async: a kernel needs a multiprocessor, the budget has 0") ||
		!strings.Contains(c.Why, VariantStaged+" ") {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestVariantsThatDoNotServe(t *testing.T) {
	d := device(t, "80")
	rng := rand.New(rand.NewPCG(4, 4))
	onCardAlone := onDevice(t, d, draw(rng, []int{656}, 0, 9, 0, 1), false)
	onCardAlone.Parts[0].Src = span(memory(t, d, false, make([]byte, 9000)), 9000)
	listed := onDevice(t, d, draw(rng, []int{656}, 0, 9, 1, 1), false)
	listedBack := onDevice(t, d, draw(rng, []int{656}, 0, 9, 1, 1), true)
	odd := onDevice(t, d, draw(rng, []int{656}, 0, 9, 0, 1), false)
	odd.Parts[0].Src.Off, odd.Parts[0].Src.N = 2, 6000
	large := onDevice(t, d, draw(rng, []int{slotBytes + 4}, 0, 1, 0, 0), false)
	plain := onDevice(t, d, draw(rng, []int{656}, 0, 9, 0, 1), false)
	for _, c := range []struct {
		name    string
		m       *DeviceMove
		b       Budget
		only    string
		want    error
		message string
	}{
		{"unknown", plain, Budget{SMs: 1}, "teleport", driver.ErrNotSupported,
			"there are async, rows"},
		{"slots too large", large, Budget{SMs: 1}, VariantAsync, driver.ErrNotSupported,
			"do not fit in 131072 bytes of shared memory"},
		{"rows by none", plain, Budget{}, VariantRows, ErrBudget, "budget has 0"},
		{"staged within the card", onCardAlone, Budget{}, VariantStaged, driver.ErrNotSupported,
			"between the host's memory and the card's"},
		{"staged to a list", listed, Budget{}, VariantStaged, driver.ErrNotSupported,
			"without a list or gaps"},
		{"staged from a list", listedBack, Budget{}, VariantStaged, driver.ErrNotSupported,
			"without a list or gaps"},
		{"staged, too large", large, Budget{}, VariantStaged, driver.ErrNotSupported,
			"do not fit in a slot"},
		{"odd address", odd, Budget{SMs: 1}, "", driver.ErrBounds, "odd address"},
		{"odd address by name", odd, Budget{SMs: 1}, VariantRows, driver.ErrBounds, "odd address"},
	} {
		got, _, err := d.Run(c.m, c.b, c.only)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.message) ||
			got != (Tally{}) {
			t.Errorf("%s: %+v, %v, want %v with %q", c.name, got, err, c.want, c.message)
		}
		_, explained := d.Explain(c.m, c.b, c.only)
		if explained == nil || explained.Error() != err.Error() {
			t.Errorf("%s: Explain says %v, Run %v", c.name, explained, err)
		}
	}
	// What kernels do not take, copies do.
	if _, l, err := d.Run(odd, Budget{}, ""); err != nil && err != driver.ErrBounds ||
		kernelOf(l.Variant) != "" {
		t.Errorf("%+v, %v", l, err)
	}
}

// TestTwoDevices: a process may have several, and their memories do not mix.
func TestTwoDevices(t *testing.T) {
	t.Setenv("STANDIN_DEVICES", "2")
	first := device(t, "90")
	second, err := OpenDevice(DeviceOptions{Library: library(t), Ordinal: 1})
	var missing *driver.UnavailableError
	if onCard() && errors.As(err, &missing) {
		return // a machine with one card
	}
	require.NoError(t, err)
	t.Cleanup(func() { _ = second.Close() })
	rng := rand.New(rand.NewPCG(6, 6))
	for _, d := range []*Device{first, second} {
		m := draw(rng, []int{656}, 0, 50, 0, 1)
		sameAsTwin(t, d, onDevice(t, d, m, false), m, Budget{SMs: 1}, VariantRows)
	}
	if first.Name() == second.Name() {
		t.Errorf("two devices are called %s", first.Name())
	}
	mixed := onDevice(t, first, draw(rng, []int{656}, 0, 5, 0, 0), false)
	mixed.Parts[0].Src = span(memory(t, second, false, make([]byte, 8*656)), 8*656)
	if _, _, err := first.Run(mixed, Budget{SMs: 1}, ""); !errors.Is(err, driver.ErrBounds) ||
		!strings.Contains(err.Error(), "another device") {
		t.Errorf("memories of two devices: %v", err)
	}
}

func TestVariantsDoNotAllocate(t *testing.T) {
	d := device(t, "90")
	m := stagedMove(rand.New(rand.NewPCG(1, 1)), []int{656}, 0, 300, 1, false)
	dm := inMemory(t, d, m, false, false)
	for _, v := range []string{VariantRows, VariantAsync, VariantLoop, VariantStaged, ""} {
		b := Budget{SMs: 1}
		if kernelOf(v) == "" && v != "" {
			b = Budget{}
		}
		if n := allocs.PerRun(100, func() { _, _, _ = d.Run(dm, b, v) }); n != 0 {
			t.Errorf("%q: %v allocations, want 0", v, n)
		}
	}
}

// TestDeviceGivesAllBack: the ring and its threads end with the Device.
func TestDeviceGivesAllBack(t *testing.T) {
	before := hostmem.InUse()["cuda-ring"]
	device(t, "90") // loads the library
	d, err := OpenDevice(DeviceOptions{Library: library(t), Threads: 2})
	require.NoError(t, err)
	m := stagedMove(rand.New(rand.NewPCG(2, 1)), []int{656}, 0, 30, 1, false)
	t.Run("in use", func(t *testing.T) {
		sameAsTwin(t, d, inMemory(t, d, m, false, true), m, Budget{}, VariantStaged)
	})
	if held := hostmem.InUse()["cuda-ring"] - before; held < ringBytes ||
		held > ringBytes+2*listBytes {
		t.Errorf("%d bytes for a ring of %d", held, ringBytes)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if left := hostmem.InUse()["cuda-ring"] - before; left != 0 {
		t.Errorf("%d bytes left", left)
	}
	empty := DeviceMove{Count: 1,
		Parts: []DevicePart{{Entry: 4, Dst: Span{Memory: &Memory{dev: d, n: 4, at: 4}, N: 4},
			Src: Span{Memory: &Memory{dev: d, n: 4, at: 8}, N: 4}}}}
	if _, _, err := d.Run(&empty, Budget{}, VariantLoop); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	for _, n := range []int{-1, threadsMax + 1} {
		if _, err := OpenDevice(DeviceOptions{Library: library(t), Threads: n}); !errors.Is(err,
			driver.ErrBounds) {
			t.Errorf("%d threads: %v", n, err)
		}
	}
}

func ExampleChoice() {
	c := Choice{Variant: VariantAsync, Candidates: []Candidate{{Variant: VariantAsync, GBps: 46},
		{Variant: VariantRows, GBps: 41.2},
		{Variant: VariantStaged, Reason: "for no multiprocessor"}}}
	c.explain()
	fmt.Println(c.String())
	// Output: async: measured: async 46.0 GB/s, rows 41.2 GB/s; staged: for no multiprocessor
}
