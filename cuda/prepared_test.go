// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/allocs"
	"github.com/sluicehq/sluice/internal/testing/fakecuda"
)

func prepare(t *testing.T, d *Device, dm *DeviceMove, only string) *Prepared {
	t.Helper()
	p, err := d.Prepare(dm, Budget{SMs: 2}, only)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// rewrite draws another list, and puts it where the old one was.
func rewrite(t *testing.T, rng *rand.Rand, m *Move, dm *DeviceMove, n int) {
	t.Helper()
	m.Src = list(rng, 1, n, n+3)
	var b []byte
	for _, v := range m.Src.U32 {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	require.NoError(t, dm.Src.List.Memory.WriteAt(b, 0))
}

// TestPreparedEqualsTheTwin with one list after the other at the same place, and other launches
// in between.
func TestPreparedEqualsTheTwin(t *testing.T) {
	const n = 150
	d := device(t, "90")
	rng := rand.New(rand.NewPCG(31, 32))
	for _, only := range []string{"", VariantAsync, VariantRows} {
		m := draw(rng, []int{656}, 0, n, 0, 1)
		dm := onDevice(t, d, m, false)
		sameAsTwin(t, d, dm, m, Budget{SMs: 2}, only) // to prepare may be to perform
		p := prepare(t, d, dm, only)
		other := draw(rng, []int{16}, 0, 30, 0, 1) // with less shared memory
		onOther := onDevice(t, d, other, true)
		for range 5 {
			rewrite(t, rng, m, dm, n)
			want, wantErr := Run(m)
			got, err := p.Run()
			if got != want || err != wantErr {
				t.Fatalf("%q: %+v, %v, want %+v, %v", only, got, err, want, wantErr)
			}
			have := make([]byte, len(m.Parts[0].Dst))
			if err := dm.Parts[0].Dst.Memory.ReadAt(have, 0); err != nil ||
				!bytes.Equal(have, m.Parts[0].Dst) {
				t.Fatalf("%q: differs from the twin's, %v", only, err)
			}
			sameAsTwin(t, d, onOther, other, Budget{SMs: 1}, only)
		}
		if only != "" && p.Launch().Variant != only {
			t.Errorf("%+v, want %s", p.Launch(), only)
		}
	}
}

// TestPreparedCountsAfresh: what one replay left out is not counted by the next.
func TestPreparedCountsAfresh(t *testing.T) {
	d := device(t, "90")
	m := &Move{Count: 3, Src: Index{U32: []uint32{0, Skip32, 99}},
		Parts: []Part{{Entry: 16, Dst: make([]byte, 48), Src: make([]byte, 48)}}}
	dm := onDevice(t, d, m, false)
	p := prepare(t, d, dm, VariantRows)
	for range 2 {
		if got, err := p.Run(); err != driver.ErrBounds ||
			got != (Tally{Moved: 1, Skipped: 1, Bad: 1, FirstBad: 2}) {
			t.Errorf("%+v, %v", got, err)
		}
	}
	require.NoError(t, dm.Src.List.Memory.WriteAt(make([]byte, 12), 0))
	for range 2 {
		if got, err := p.Run(); err != nil || got != (Tally{Moved: 3}) {
			t.Errorf("%+v, %v", got, err)
		}
	}
	if n := allocs.PerRun(100, func() { _, _ = p.Run() }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

// TestReplayBesideACapture: while a thread of the program captures a graph, a replay is waited for,
// and the next one counts afresh.
func TestReplayBesideACapture(t *testing.T) {
	d := device(t, "90")
	if onCard() {
		return // where only the stand-in is told to capture
	}
	dm := onDevice(t, d, draw(rand.New(rand.NewPCG(1, 1)), []int{656}, 0, 300, 0, 1), false)
	p := prepare(t, d, dm, VariantAsync)
	want, err := p.Run()
	require.ErrorIs(t, err, driver.ErrBounds)
	for _, all := range []uint32{1, 2} { // threads that care for a capture, or all
		standIn.library.Set(t, fakecuda.DelayMicros, 50000)
		standIn.library.Put(fakecuda.Capture, all)
		_, err = p.Run()
		standIn.library.Put(fakecuda.Capture, 0)
		require.Equal(t, all == 2, err != nil && !errors.Is(err, driver.ErrBounds), "%v", err)
		got, err := p.Run()
		require.ErrorIs(t, err, driver.ErrBounds)
		require.Equal(t, want, got)
		standIn.library.Put(fakecuda.DelayMicros, 0)
	}
}

func TestPrepareRefuses(t *testing.T) {
	d := device(t, "90")
	before := hostmem.InUse()["cuda-tally"]
	dm := onDevice(t, d, draw(rand.New(rand.NewPCG(1, 8)), []int{656}, 0, 9, 0, 1), false)
	for _, c := range []struct {
		b       Budget
		only    string
		want    error
		message string
	}{
		{Budget{}, "", ErrBudget, "budget has 0"},
		{Budget{SMs: 1}, VariantStaged, driver.ErrNotSupported, "this variant has none"},
		{Budget{SMs: 1}, "teleport", driver.ErrNotSupported, "teleport"},
	} {
		if p, err := d.Prepare(dm, c.b, c.only); p != nil || !errors.Is(err, c.want) ||
			!strings.Contains(err.Error(), c.message) {
			t.Errorf("%+v %q: %v", c.b, c.only, err)
		}
	}
	p, err := d.Prepare(dm, Budget{SMs: 1}, "")
	require.NoError(t, err)
	require.NoError(t, dm.Src.List.Memory.Close())
	if _, err := p.Run(); err != driver.ErrClosed {
		t.Errorf("a list that is closed: %v", err)
	}
	for range 2 {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := p.Run(); err != driver.ErrClosed {
		t.Errorf("closed: %v", err)
	}
	if left := hostmem.InUse()["cuda-tally"] - before; left != 0 {
		t.Errorf("%d bytes left", left)
	}
	if _, err := d.Prepare(dm, Budget{SMs: 1}, ""); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("prepare with a closed list: %v", err)
	}
}

// TestPrepareWhereCopiesAreFaster: a graph has a kernel all the same, and says so.
func TestPrepareWhereCopiesAreFaster(t *testing.T) {
	d := device(t, "90")
	dm := onDevice(t, d, draw(rand.New(rand.NewPCG(1, 9)), []int{656}, 0, 500, 0, 0), false)
	if _, err := d.Explain(dm, Budget{SMs: 2}, ""); err != nil {
		t.Fatal(err)
	}
	for _, c := range d.choices { // as if copies had been measured to be faster
		c.Variant = VariantLoop
	}
	p := prepare(t, d, dm, "")
	if l := p.Launch(); l.Kernel == "" || !strings.Contains(l.Why, "kernels alone") {
		t.Errorf("%+v", l)
	}
	if got, err := p.Run(); err != nil || got.Moved != 500 {
		t.Errorf("%+v, %v", got, err)
	}
}
