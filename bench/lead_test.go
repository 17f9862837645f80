// SPDX-License-Identifier: Apache-2.0

package bench

import "testing"

// TestLeadsTakeTheBestOfEachSide: by medians, without yardsticks and rows without figures.
func TestLeadsTakeTheBestOfEachSide(t *testing.T) {
	s := Shape{Op: "write", Size: 656, Batch: 64}
	row := func(peer string, p50 float64, change func(*Row)) Row {
		r := Row{Kind: KindTransfer, Lane: Host, Peer: peer, Shape: s, P50us: p50, GBps: 1}
		if change != nil {
			change(&r)
		}
		return r
	}
	ours := func(r *Row) { r.Ours = true }
	report := &Report{Rows: []Row{
		row("a", 30, nil), row("b", 20, nil), row("roof", 1, func(r *Row) { r.Yardstick = true }),
		row("far", 2, func(r *Row) {
			r.Lane = TCP
		}), row("failed", 0, func(r *Row) { r.Reason = "it hung" }),
		row("x", 10, ours), row("y", 40, ours),
	}}
	leads := report.Leads(Host)
	if len(leads) != 1 || leads[0].Theirs.Peer != "b" || leads[0].Ratio("x") != 2 ||
		leads[0].Ratio("y") != 0.5 || leads[0].Best() != 2 || leads[0].Ratio("z") != 0 {
		t.Errorf("%+v", leads)
	}
}

func TestScoreCountsShapesWithFiguresOfBothSides(t *testing.T) {
	lead := func(theirs float64, ours map[string]float64) Lead {
		l := Lead{Theirs: &Row{P50us: theirs}, Ours: map[string]*Row{}}
		for peer, p50 := range ours {
			l.Ours[peer] = &Row{P50us: p50}
		}
		return l
	}
	leads := []Lead{lead(10, map[string]float64{"x": 5}),
		lead(10, map[string]float64{"x": 20, "y": 2}), lead(10, map[string]float64{"x": 10.1}),
		lead(10, nil)}
	if got := scoreOf(leads, "x"); got != (score{1, 1, 1}) {
		t.Errorf("x: %+v", got)
	}
	if got := scoreOf(leads, "y"); got != (score{1, 0, 0}) {
		t.Errorf("y: %+v", got)
	}
}

func TestTallyOfRounds(t *testing.T) {
	var sum tally
	for _, a := range []Answer{{Ops: 1, NS: 1000, Samples: []int64{1000}},
		{Ops: 4, NS: 1000, Samples: []int64{100, 200, 300, 400}},
		{Ops: 2, NS: 1000, Samples: []int64{450, 550}}} {
		sum.add(&a, 1000, 1000)
	}
	var r Row
	r.Size = 500
	sum.fill(&r)
	if r.GBps != 2 || r.DescsPerS != 4e6 || r.P50us != 0.4 || r.P99us != 1 || r.Ops != 7 ||
		r.Rounds != 3 {
		t.Errorf("%+v", r)
	}
	if want := 1e-6 / 2e-6; r.CPUPerGB != want { // a µs for 2,000 bytes
		t.Errorf("%v processor seconds a GB, want %v", r.CPUPerGB, want)
	}
}
