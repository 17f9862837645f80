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
// added, never renamed.
type Report struct {
	Requests     int    `json:"requests"`      // of the trace, aborted ones included
	BlocksMoved  uint64 `json:"blocks_moved"`  // of requests that were handed over
	BlocksReused uint64 `json:"blocks_reused"` // that decode had already
	Bytes        uint64 `json:"bytes"`         // written by layers that arrived
	// layers of blocks with a wrong digest, and late writes
	Mismatches uint64  `json:"mismatches"`
	Aborted    int     `json:"aborted"`
	GBps       float64 `json:"gbps"`        // bytes over the time in which a layer was in flight
	MemcpyGBps float64 `json:"memcpy_gbps"` // the same pieces by as many threads, in alternation
	// offer to confirmation, filling and memcpy not counted
	RequestMs Quantiles `json:"request_ms"`
	LayerUs   Quantiles `json:"layer_us"` // post to completion
	Route     string    `json:"route"`

	Model           string   `json:"model"`
	Ratio           float64  `json:"ratio"` // gbps / memcpy_gbps
	Threads         int      `json:"threads"`
	PoolBytes       uint64   `json:"pool_bytes"`
	Memory          string   `json:"memory"`           // of the pool: "host"
	BlocksChecked   uint64   `json:"blocks_checked"`   // digests of all layers of as many blocks
	BlocksWatched   uint64   `json:"blocks_watched"`   // poisoned after an abort
	BlocksLeaked    uint64   `json:"blocks_leaked"`    // in use by no request at the end
	FirstMismatches []string `json:"first_mismatches"` // the first few, in words
	// that rules have brought about, in both processes
	Faults  uint64 `json:"faults"`
	Retried int    `json:"retried"` // hand-overs that failed and were begun again
	Seconds Times  `json:"seconds"`

	Offload *OffloadReport `json:"offload,omitempty"` // with --offload alone

	faulty bool // rules were given: the report says what came of them, be it nothing
}

// Times say where the time went. The two processes work side by side, so that
// the parts are more than the whole.
type Times struct {
	Setup    float64 `json:"setup"`    // until both processes were connected, memory faulted in
	Replay   float64 `json:"replay"`   // all requests
	Fill     float64 `json:"fill"`     // prefill: making the content
	Transfer float64 `json:"transfer"` // prefill: layers in flight
	Memcpy   float64 `json:"memcpy"`   // prefill: the baseline
	Digest   float64 `json:"digest"`   // decode: checking
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
	Digest     time.Duration `json:"digest_ns"`
	Faults     uint64        `json:"faults"`

	Offload *OffloadResult `json:"offload"`
}

func merge(plan *Plan, pre *PrefillResult, dec *DecodeResult, setup time.Duration) *Report {
	requests := figures.NewSamples(len(pre.Requests))
	for _, d := range pre.Requests {
		requests.Add(d)
	}
	r := &Report{
		Requests: len(plan.Requests), BlocksMoved: pre.BlocksMoved, BlocksReused: pre.BlocksReused,
		Bytes: pre.Bytes, Mismatches: dec.Mismatches, Aborted: pre.Aborted,
		GBps: figures.GBps(pre.Bytes, pre.Transfer), MemcpyGBps: figures.GBps(pre.MemcpyBytes,
			pre.Memcpy),
		RequestMs: quantiles(requests, time.Millisecond), LayerUs: pre.LayerUs, Route: pre.Route,
		Model: plan.Model, Memory: dec.Memory, Threads: plan.Threads, BlocksChecked: dec.Checked,
		BlocksWatched: dec.Watched,
		BlocksLeaked:  dec.Leaked, Faults: pre.Faults + dec.Faults, Retried: pre.Retried,
		FirstMismatches: append([]string{}, dec.First...),
		Seconds: Times{Setup: setup.Seconds(), Replay: pre.Replay.Seconds(),
			Fill:     pre.Fill.Seconds(),
			Transfer: pre.Transfer.Seconds(), Memcpy: pre.Memcpy.Seconds(),
			Digest: dec.Digest.Seconds()},
	}
	r.faulty = plan.faulty()
	if r.MemcpyGBps > 0 {
		r.Ratio = r.GBps / r.MemcpyGBps
	}
	r.Offload = dec.Offload.report()
	return r
}

// Err is what is wrong with a replay that came to its end.
func (r *Report) Err() error {
	switch {
	case r.Mismatches > 0:
		return fmt.Errorf("%d mismatches, the first: %s", r.Mismatches, r.FirstMismatches[0])
	case r.BlocksLeaked > 0:
		return fmt.Errorf("%d blocks of the pool were not given back", r.BlocksLeaked)
	}
	return nil
}

// Text prints the report for people.
func (r *Report) Text(w io.Writer) error {
	t := r.Seconds
	_, err := fmt.Fprintf(w, `model       %s, pool %s of %s memory, %d thread(s)
requests    %d, %d of them aborted
blocks      %d moved, %d reused, %d checked, %d watched after aborts, %d leaked
mismatches  %d
route       %s
transfer    %s in %.2f s, %.2f GB/s, memcpy %.2f GB/s, ratio %.3f
request     p50 %.2f ms, p99 %.2f ms (without filling and memcpy)
layer       p50 %.1f µs, p99 %.1f µs
time        setup %.2f s, replay %.2f s; prefill: filling %.2f s, memcpy %.2f s; decode: digests %.2f s
`,
		r.Model, figures.RoundSize(r.PoolBytes), r.Memory, r.Threads, r.Requests, r.Aborted,
		r.BlocksMoved, r.BlocksReused, r.BlocksChecked, r.BlocksWatched, r.BlocksLeaked,
		r.Mismatches, r.Route,
		figures.RoundSize(r.Bytes), t.Transfer, r.GBps, r.MemcpyGBps, r.Ratio,
		r.RequestMs.P50, r.RequestMs.P99, r.LayerUs.P50, r.LayerUs.P99,
		t.Setup, t.Replay, t.Fill, t.Memcpy, t.Digest)
	if err == nil && r.faulty {
		_, err = fmt.Fprintf(w, "faults      %d brought about, %d hand-overs begun again\n",
			r.Faults, r.Retried)
	}
	if err == nil && r.Offload != nil {
		err = r.Offload.text(w)
	}
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
