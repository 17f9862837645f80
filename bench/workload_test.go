// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func workload(t *testing.T, name string, o WorkloadOptions) *Workload {
	t.Helper()
	o.Op = driver.Write
	w, err := NewWorkload(name, o)
	require.NoError(t, err)
	return w
}

func TestWorkloadOfAModel(t *testing.T) {
	type step struct {
		size              uint64
		batch, times, cut int
	}
	for _, c := range []struct {
		name   string
		tokens int
		want   []step
	}{
		// 16 tokens x 4,096 bytes x 32 layers; K and V of one layer are 32 KiB each.
		{"llama3.1-8b", 1024, []step{{2 << 20, 64, 1, 0}, {32 << 10, 128, 32, 0}}},
		{"llama3.1-8b/block/tp8/pp2", 1024, []step{{128 << 10, 64, 1, 0}}},
		{"llama3.1-8b/layer/tp8/pp2", 1000, []step{{4 << 10, 126, 16, 0}}},
		// Replicated over ranks, and two parts of different sizes.
		{"deepseek-v3.2/layer/tp8", 1024, []step{{656 * 16, 64, 61, 0}, {132 * 16, 64, 61, 0}}},
		{"deepseek-v3.2-latent/token", 8192, []step{{656, 2048, 61, 0}}},
		// 128 MiB are 25 blocks of 5 MiB, of the 64 that the prompt has.
		{"llama3.1-70b/block", 1024, []step{{5 << 20, 25, 1, 39}}},
	} {
		w := workload(t, c.name, WorkloadOptions{Tokens: c.tokens})
		if len(w.Steps) != len(c.want) {
			t.Fatalf("%s: %+v", c.name, w.Steps)
		}
		for i, s := range w.Steps {
			if got := (step{s.Size, s.Batch, s.Times, s.Cut}); got != c.want[i] || !s.Pages ||
				!strings.HasPrefix(s.Name, c.name+" ") {
				t.Errorf("%s, step %d: %+v of %+v, want %+v", c.name, i, got, s, c.want[i])
			}
		}
	}
}

func TestEveryWorkloadHasShapesThatFit(t *testing.T) {
	list := Workloads()
	if len(list) < 10 {
		t.Fatalf("%d workloads", len(list))
	}
	for _, known := range list {
		if known.About == "" {
			t.Errorf("%s: nothing about it", known.Name)
		}
		w := workload(t, known.Name, WorkloadOptions{Threads: 2})
		if len(w.Steps) == 0 {
			t.Errorf("%s has no shapes", known.Name)
		}
		for _, s := range w.Steps {
			if s.BatchBytes() > workloadBytes || s.Threads != 2 || s.Times < 1 {
				t.Errorf("%s: %+v", known.Name, s)
			}
		}
	}
	if n := len(workload(t, SizeSweep, WorkloadOptions{}).Steps); n != 15 {
		t.Errorf("%d sizes from 4 KiB to 64 MiB", n)
	}
}

func TestBadWorkloads(t *testing.T) {
	for name, says := range map[string]string{
		"":                    "nixlbench",
		"gpt-5":               "llama3.1-8b",
		"llama3.1-8b/rows":    "block, layer, token",
		"llama3.1-8b/tpx":     "tpx",
		"llama3.1-8b/tp3":     "3 ranks",
		"llama3.1-8b/pp99":    "99 pipeline stages",
		"nixlbench/tp2":       "nixlbench-batch",
		"llama3.1-8b/tp0/pp1": "1 or more",
	} {
		_, err := NewWorkload(name, WorkloadOptions{Op: driver.Write})
		if !errors.Is(err, ErrWorkload) || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if _, err := NewWorkload("qwen3-8b", WorkloadOptions{Op: driver.Write, Tokens: -1}); !errors.Is(
		err, ErrWorkload) {
		t.Errorf("-1 tokens: %v", err)
	}
}
