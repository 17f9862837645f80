// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"io"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
)

// Quantiles are of a list of times.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

func quantiles(s *figures.Samples, unit time.Duration) Quantiles {
	return Quantiles{
		P50: float64(s.Percentile(50)) / float64(unit),
		P99: float64(s.Percentile(99)) / float64(unit),
	}
}

// Report is the outcome of a replay. The JSON keys are an interface: keys may be
// added, never renamed. Those of a pair with a pool or of groups of ranks stand beside the others.
type Report struct {
	Model    string `json:"model"`
	Route    string `json:"route"`
	Requests int    `json:"requests"` // of the trace, aborted ones included
	Aborted  int    `json:"aborted"`
	Bytes    uint64 `json:"bytes"` // that have come
	// Pair: bytes over the time in which a layer was in flight. Groups: the bytes of rounds without
	// an end before time, over the time from the word to hand over to the last rank's word that it
	// has.
	GBps      float64 `json:"gbps"`
	PoolBytes uint64  `json:"pool_bytes"` // of all ranks that receive; of groups, those that send, too
	// Layers of blocks, or cells of ranks, that are not what they must be, late writes among them,
	// and layers of which ranks have found other digests.
	Mismatches      uint64   `json:"mismatches"`
	FirstMismatches []string `json:"first_mismatches"` // the first few, in words
	Leaked          uint64   `json:"leaked"`           // blocks in use by no request at the end, leases
	Faults          uint64   `json:"faults"`           // that rules have brought about, in all processes
	Seconds         Times    `json:"seconds"`

	*PairReport
	*GroupReport

	faulty bool // rules were given: the report says what came of them, be it nothing
}

// PairReport is what is reported of a pair alone.
type PairReport struct {
	Threads       int     `json:"threads"`
	Memory        string  `json:"memory"`        // of the pool: "host"
	BlocksMoved   uint64  `json:"blocks_moved"`  // of requests that were handed over
	BlocksReused  uint64  `json:"blocks_reused"` // that decode had already
	BlocksChecked uint64  `json:"blocks_checked"`
	BlocksWatched uint64  `json:"blocks_watched"` // poisoned after an abort
	MemcpyGBps    float64 `json:"memcpy_gbps"`    // the same pieces by as many threads, in alternation
	Ratio         float64 `json:"ratio"`          // gbps / memcpy_gbps
	// offer to confirmation, filling and memcpy not counted
	RequestMs Quantiles `json:"request_ms"`
	LayerUs   Quantiles `json:"layer_us"` // post to completion
	Retried   int       `json:"retried"`  // hand-overs that failed and were begun again

	Offload *OffloadReport `json:"offload,omitempty"` // with --offload alone
}

// Times say where the time went. The processes work side by side, so that
// the parts are more than the whole.
type Times struct {
	Setup    float64 `json:"setup"`            // until all were connected, memory faulted in
	Replay   float64 `json:"replay"`           // all requests
	Transfer float64 `json:"transfer"`         // layers in flight; of groups, requests
	Fill     float64 `json:"fill,omitempty"`   // of a pair: making the content
	Memcpy   float64 `json:"memcpy,omitempty"` // of a pair: the baseline
	Check    float64 `json:"check,omitempty"`  // of a pair: comparing
}

// PrefillResult and DecodeResult are what the processes report.
type PrefillResult struct {
	BlocksMoved  uint64          `json:"blocks_moved"`
	BlocksReused uint64          `json:"blocks_reused"`
	Bytes        uint64          `json:"bytes"`
	MemcpyBytes  uint64          `json:"memcpy_bytes"`
	Aborted      int             `json:"aborted"`
	Route        string          `json:"route"`
	Fill         time.Duration   `json:"fill_ns"`
	Transfer     time.Duration   `json:"transfer_ns"`
	Memcpy       time.Duration   `json:"memcpy_ns"`
	Replay       time.Duration   `json:"replay_ns"`
	Requests     []time.Duration `json:"requests_ns"`
	LayerUs      Quantiles       `json:"layer_us"`
	Faults       uint64          `json:"faults"`
	Retried      int             `json:"retried"`
}

// DecodeResult is the decode process's part.
type DecodeResult struct {
	Memory     string        `json:"memory"`
	Checked    uint64        `json:"checked"`
	Watched    uint64        `json:"watched"`
	Leaked     uint64        `json:"leaked"`
	Mismatches uint64        `json:"mismatches"`
	First      []string      `json:"first"`
	Check      time.Duration `json:"check_ns"`
	Faults     uint64        `json:"faults"`

	Offload *OffloadResult `json:"offload"`
}

func merge(plan *Plan, pre *PrefillResult, dec *DecodeResult, setup time.Duration) *Report {
	requests := figures.NewSamples(len(pre.Requests))
	for _, d := range pre.Requests {
		requests.Add(d)
	}
	r := &Report{Model: plan.Model, Route: pre.Route, Requests: len(plan.Requests),
		Aborted: pre.Aborted, Bytes: pre.Bytes, GBps: figures.GBps(pre.Bytes, pre.Transfer),
		Mismatches: dec.Mismatches, FirstMismatches: append([]string{}, dec.First...),
		Leaked: dec.Leaked, Faults: pre.Faults + dec.Faults, faulty: plan.faulty(),
		Seconds: Times{Setup: setup.Seconds(), Replay: pre.Replay.Seconds(),
			Transfer: pre.Transfer.Seconds(), Fill: pre.Fill.Seconds(),
			Memcpy: pre.Memcpy.Seconds(), Check: dec.Check.Seconds()},
		PairReport: &PairReport{Threads: plan.Threads, Memory: dec.Memory,
			BlocksMoved: pre.BlocksMoved, BlocksReused: pre.BlocksReused,
			BlocksChecked: dec.Checked, BlocksWatched: dec.Watched,
			MemcpyGBps: figures.GBps(pre.MemcpyBytes, pre.Memcpy),
			RequestMs:  quantiles(requests, time.Millisecond), LayerUs: pre.LayerUs,
			Retried: pre.Retried, Offload: dec.Offload.report()},
	}
	if r.MemcpyGBps > 0 {
		r.Ratio = r.GBps / r.MemcpyGBps
	}
	return r
}

// Err is what is wrong with a replay that came to its end.
func (r *Report) Err() error {
	switch {
	case r.Mismatches > 0 && len(r.FirstMismatches) > 0:
		return fmt.Errorf("%d mismatches, the first: %s", r.Mismatches, r.FirstMismatches[0])
	case r.Mismatches > 0:
		return fmt.Errorf("%d mismatches: digests differ", r.Mismatches)
	case r.Leaked > 0:
		return fmt.Errorf("%d blocks or leases were not given back", r.Leaked)
	case r.GroupReport != nil:
		return r.GroupReport.err()
	}
	return nil
}

// Text prints the report for people.
func (r *Report) Text(w io.Writer) error {
	text := r.pairText
	if r.GroupReport != nil {
		text = r.groupText
	}
	if err := text(w); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// pairText is Text of a pair.
func (r *Report) pairText(w io.Writer) error {
	t := r.Seconds
	_, err := fmt.Fprintf(w, `model       %s, pool %s of %s memory, %d thread(s)
requests    %d, %d of them aborted
blocks      %d moved, %d reused, %d checked, %d watched after aborts, %d leaked
mismatches  %d
route       %s
transfer    %s in %.2f s, %.2f GB/s, memcpy %.2f GB/s, ratio %.3f
request     p50 %.2f ms, p99 %.2f ms (without filling and memcpy)
layer       p50 %.1f µs, p99 %.1f µs
time        setup %.2f s, replay %.2f s; prefill: filling %.2f s, memcpy %.2f s; decode: checks %.2f s
`,
		r.Model, figures.RoundSize(r.PoolBytes), r.Memory, r.Threads, r.Requests, r.Aborted,
		r.BlocksMoved, r.BlocksReused, r.BlocksChecked, r.BlocksWatched, r.Leaked,
		r.Mismatches, r.Route,
		figures.RoundSize(r.Bytes), t.Transfer, r.GBps, r.MemcpyGBps, r.Ratio,
		r.RequestMs.P50, r.RequestMs.P99, r.LayerUs.P50, r.LayerUs.P99,
		t.Setup, t.Replay, t.Fill, t.Memcpy, t.Check)
	if err == nil && r.faulty {
		_, err = fmt.Fprintf(w, "faults      %d brought about, %d hand-overs begun again\n",
			r.Faults, r.Retried)
	}
	if err == nil && r.Offload != nil {
		err = r.Offload.text(w)
	}
	return err
}
