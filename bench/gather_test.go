// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

func TestGather(t *testing.T) {
	for _, op := range []driver.Op{driver.Read, driver.Write} {
		s := Shape{Op: op, Size: 656, Batch: 64, Pages: true, Spread: 4 << 20, Threads: 2}
		r, err := Gather(t.Context(), s, Options{Rounds: 2, Slice: 1})
		require.NoError(t, err)
		want := map[driver.Op]string{driver.Read: GatherOp, driver.Write: ScatterOp}[op]
		if r.Op != want || r.Backend != CPUName || r.Rounds != 2 || r.GBps <= 0 || r.Spread == 0 ||
			len(r.Baselines) != 2 {
			t.Errorf("%+v", r)
		}
		if r.Baseline.Name != "memcpy" || r.Ratio != r.GBps/r.Baseline.GBps {
			t.Errorf("baseline %+v, ratio %v", r.Baseline, r.Ratio)
		}
	}
	if left := hostmem.InUse()["bench-baseline"]; left != 0 {
		t.Errorf("%d bytes left", left)
	}
}

func TestGatherRefuses(t *testing.T) {
	var layout *cuda.LayoutError
	_, err := Gather(t.Context(), Shape{Op: driver.Read, Size: 130, Batch: 1, Pages: true,
		Threads: 1}, Options{})
	if !errors.As(err, &layout) {
		t.Errorf("130 bytes: %v", err)
	}
	for _, s := range []Shape{{Op: driver.Read, Size: 656, Batch: 1, Threads: 1},
		{Op: driver.Read, Size: 656, Pages: true, Threads: 1}} {
		if _, err := Gather(t.Context(), s, Options{}); !errors.Is(err, ErrShape) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

// TestGatheredIsWhatPlainCopies: both ways of a comparison do the same.
func TestGatheredIsWhatPlainCopies(t *testing.T) {
	for _, op := range []driver.Op{driver.Read, driver.Write} {
		s := &Shape{Op: op, Size: 656, Batch: 50, Pages: true, Spread: 1 << 20, Threads: 2}
		var ends [2]*memories
		for i := range ends {
			m, err := allocMemories(s, hostmem.HugeNone)
			require.NoError(t, err)
			defer m.close()
			for j := range m.compact.Bytes() {
				m.compact.Bytes()[j] = byte(j % 251)
			}
			for j := range m.scattered.Bytes() {
				m.scattered.Bytes()[j] = byte(j % 241)
			}
			ends[i] = m
		}
		for _, p := range s.plans() {
			for i := range p.places {
				require.NoError(t, errors.Join(ends[0].plain(&p).do(i),
					newGathered(ends[1], &p).do(i)))
			}
		}
		if !bytes.Equal(ends[0].compact.Bytes(), ends[1].compact.Bytes()) ||
			!bytes.Equal(ends[0].scattered.Bytes(), ends[1].scattered.Bytes()) {
			t.Errorf("%v: the twin and the loop of memcpy differ", op)
		}
	}
}
