// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
)

// The kinds of rows.
const (
	KindTransfer = "transfer"
	KindPing     = "ping" // round trip of a notification
	KindIdle     = "idle" // CPU time of both ends while idle
)

// Row is one line of the table. The JSON keys are a public interface: keys may be added, never
// renamed. A row with a Reason has no figures.
type Row struct {
	Kind string `json:"kind"`
	Lane Lane   `json:"lane"`
	Peer string `json:"peer"`
	Shape

	GBps      float64 `json:"gbps,omitempty"`        // median of the rounds, 1e9 bytes a second
	DescsPerS float64 `json:"descs_per_s,omitempty"` // pieces a second, by the same median
	P50us     float64 `json:"p50_us,omitempty"`      // of one operation, from post to completion
	P99us     float64 `json:"p99_us,omitempty"`
	CPUPerGB  float64 `json:"cpu_s_per_gb,omitempty"` // CPU seconds of both ends
	Bytes     uint64  `json:"bytes,omitempty"`        // of one operation, if the driver says it
	Share     float64 `json:"share,omitempty"`        // of one CPU, while idle
	Rounds    int     `json:"rounds,omitempty"`
	Ops       int     `json:"ops,omitempty"`

	// rate of sluice divided by that of each yardstick
	Ratios map[string]float64 `json:"ratios,omitempty"`

	Ours      bool   `json:"ours,omitempty"`
	Yardstick bool   `json:"yardstick,omitempty"`
	Timed     bool   `json:"timed,omitempty"`  // a program that measures itself
	Note      string `json:"note,omitempty"`   // remark on the figures
	Reason    string `json:"reason,omitempty"` // why there are no figures
	Wrong     bool   `json:"wrong,omitempty"`  // wrong bytes arrived, or a malformed answer
}

// row returns a row of the participant without figures.
func (p *Participant) row(kind string) Row {
	return Row{Kind: kind, Lane: p.Lane, Peer: p.Name, Ours: p.Ours, Yardstick: p.Yardstick,
		Timed: p.Timed}
}

// failed returns a row that says why there are no figures.
func (p *Participant) failed(kind string, s Shape, err error) Row {
	r := p.row(kind)
	r.Shape, r.Reason, r.Wrong = s, err.Error(), errors.Is(err, ErrNonsense)
	for class := ": " + ErrUnsupported.Error(); strings.HasSuffix(r.Reason, class); {
		r.Reason = strings.TrimSuffix(r.Reason, class)
	}
	return r
}

// tally sums the rounds of one participant in one shape.
type tally struct {
	samples     []int64
	rates, cpus []float64
	ops         int
	note        string // of the last round
}

// add takes one round.
func (t *tally) add(a *Answer, bytes uint64, cpu time.Duration) {
	moved := uint64(a.Ops) * bytes
	t.samples = append(t.samples, a.Samples...)
	t.rates = append(t.rates, figures.GBps(moved, time.Duration(a.NS)))
	if moved > 0 {
		t.cpus = append(t.cpus, cpu.Seconds()/(float64(moved)/1e9))
	}
	t.ops += a.Ops
	t.note = a.Text
}

func (t *tally) fill(r *Row) {
	slices.Sort(t.samples)
	r.P50us, r.P99us = float64(figures.Percentile(t.samples, 50))/1e3,
		float64(figures.Percentile(t.samples, 99))/1e3
	r.GBps = figures.Median(t.rates)
	if r.Size > 0 {
		r.DescsPerS = r.GBps * 1e9 / float64(r.Size)
	}
	if !r.Timed {
		r.CPUPerGB = figures.Median(t.cpus)
	}
	r.Rounds, r.Ops, r.Note = len(t.rates), t.ops, t.note
}
