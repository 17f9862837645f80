// SPDX-License-Identifier: Apache-2.0

package bench

// Result is one measured shape beside its baseline. The JSON keys are an
// interface: keys may be added, never renamed.
type Result struct {
	Backend string `json:"backend"`
	// "write", "read", "notify", "pingpong", "landing", "gather", "scatter" or "reshape"
	Op          string     `json:"op"`
	Size        uint64     `json:"size"` // bytes of a piece
	Batch       int        `json:"batch"`
	Pages       bool       `json:"pages"`
	Spread      uint64     `json:"spread"` // bytes that the places of pages were drawn from; else 0
	Hot         bool       `json:"hot"`    // all pieces at one place
	Gather      bool       `json:"gather"` // places on the initiator's side, one run on the peer's
	Threads     int        `json:"threads"`
	GBps        float64    `json:"gbps"` // median of the rounds, 1e9 bytes a second
	OpsPerS     float64    `json:"ops_per_s"`
	P50us       float64    `json:"p50_us"` // of one batch, post to done
	P99us       float64    `json:"p99_us"`
	AllocsPerOp float64    `json:"allocs_per_op"` // on the initiating side
	Baseline    Baseline   `json:"baseline"`
	Ratio       float64    `json:"ratio"`     // GBps / Baseline.GBps
	Baselines   []Baseline `json:"baselines"` // the first is Baseline
	Rounds      int        `json:"rounds"`
	Ops         int        `json:"ops"` // batches measured
	Route       string     `json:"route"`
	Memory      string     `json:"memory"` // that was moved: "host", or the backend whose it was

	// Lane names the transports, where a run measures several.
	Lane string `json:"lane,omitempty"`
	// Workload names the step of a workload that this is.
	Workload string `json:"workload,omitempty"`
	// Extra are further figures, by unit.
	Extra map[string]float64 `json:"extra,omitempty"`
	// Notes say what was not measured, and why, and what to keep in mind.
	Notes []string `json:"notes,omitempty"`
}

// Baseline is a simpler way to move the same pieces, measured in alternation.
type Baseline struct {
	Name  string  `json:"name"`
	GBps  float64 `json:"gbps"` // median of the rounds
	P50us float64 `json:"p50_us"`
}

// SetBaselines fills in the baselines and the ratio to the first of them.
func (r *Result) SetBaselines(b []Baseline) {
	r.Baselines = b
	if len(b) == 0 {
		return
	}
	r.Baseline = b[0]
	r.Ratio = r.RatioTo(&b[0])
}

// RatioTo is how many times as fast as a baseline this was: in rates, or in times where
// nothing but a time was measured.
func (r *Result) RatioTo(b *Baseline) float64 {
	switch {
	case b.GBps > 0 && r.GBps > 0:
		return r.GBps / b.GBps
	case r.P50us > 0:
		return b.P50us / r.P50us
	}
	return 0
}

// spreads reports whether places were drawn from another memory than usual.
func (r *Result) spreads() bool { return r.Pages && r.Spread/r.Size != spreadDefault/r.Size }
