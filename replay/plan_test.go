// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"reflect"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/trace"
)

func planOf(blocks ...int) *Plan {
	p := &Plan{Model: "deepseek-v3.2", Threads: 1}
	for _, n := range blocks {
		p.Requests = append(p.Requests, trace.Request{InputLength: n * trace.BlockTokens,
			HashIDs: make([]uint64, n)})
	}
	return p
}

// blockBytes is what a block of deepseek-v3.2 takes in the pool, gaps included.
func blockBytes(t *testing.T) uint64 {
	t.Helper()
	g, err := planOf(1).geometry(1, layout.BlockMajor)
	if err != nil {
		t.Fatal(err)
	}
	return g.Stride()
}

func TestChoosePool(t *testing.T) {
	block := blockBytes(t)
	for _, tc := range []struct {
		name             string
		bytes, available uint64
		want             uint64 // 0: an error that contains says
		says             string
	}{
		{"more than the largest", 0, 1000 * block, 15, ""},
		{"a third of the memory", 0, 36 * block, 12, ""},
		{"at least the largest", 0, 21 * block, 10, ""},
		{"nobody knows how much memory there is", 0, 0, 15, ""},
		{"not enough memory", 0, 9 * block, 0, "available"},
		{"not enough for prefill", 0, 15 * block, 0, "available"},
		{"as told", 13 * block, 1000 * block, 13, ""},
		{"told too little", 9 * block, 1000 * block, 0, "request 3 needs 10 blocks"},
		{"told whatever", 50 * block, 0, 50, ""},
		{"told too much", 50 * block, 40 * block, 0, "available"},
	} {
		p := planOf(1, 5, 10, 7)
		err := p.choosePool(tc.bytes, tc.available)
		switch {
		case tc.want == 0 && (err == nil || !strings.Contains(err.Error(), tc.says)):
			t.Errorf("%s: %d blocks, error %v", tc.name, p.PoolBlocks, err)
		case tc.want != 0 && (err != nil || p.PoolBlocks != tc.want):
			t.Errorf("%s: %d blocks, want %d, error %v", tc.name, p.PoolBlocks, tc.want, err)
		}
	}
}

func TestPlanAborts(t *testing.T) {
	p := planOf(make([]int, 40)...)
	p.planAborts(0.2, 61)
	if len(p.Aborts) != 8 {
		t.Errorf("%d of 40 requests abort at a rate of 0.2", len(p.Aborts))
	}
	by := map[Side]int{}
	for at, a := range p.Aborts {
		by[a.By]++
		if a.Layer < 0 || a.Layer > 59 || at < 0 || at > 39 {
			t.Errorf("request %d aborts at layer %d", at, a.Layer)
		}
	}
	if by[PrefillSide] != 4 || by[DecodeSide] != 4 {
		t.Errorf("sides %v", by)
	}
	again := planOf(make([]int, 40)...)
	again.planAborts(0.2, 61)
	if !reflect.DeepEqual(again.Aborts, p.Aborts) {
		t.Error("two runs abort different requests")
	}
	for rate, want := range map[float64]int{0: 0, 0.01: 1, 1: 40} {
		if p.planAborts(rate, 61); len(p.Aborts) != want {
			t.Errorf("rate %v: %d aborts", rate, len(p.Aborts))
		}
	}
}

func TestPoolSizeIsReadable(t *testing.T) {
	if got := poolSize(3<<20 + 1); got != "4MiB" {
		t.Errorf("poolSize = %q", got)
	}
}
