// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// probesMax bounds probes that wait for a cache that hangs.
const probesMax = 16

// operatorHandler answers /metrics with what a server reports at that moment, and two probes:
// /healthz once the cache answers, which one that hangs never does, and /readyz where ready returns
// nil, else why clients are not to come.
func operatorHandler(report func() serve.Report, m *membership, answers func(),
	ready func() error) http.Handler {
	r := prometheus.NewRegistry()
	r.MustRegister(cacheMetrics(report))
	if len(m.cfg.cluster.etcd) > 0 {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "sluice_cache_in_cluster",
			Help: "1: the node is in the directory, which answers; 0: not yet, or no answer.",
		}, m.reached))
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(r, promhttp.HandlerOpts{}))
	waiting := make(chan struct{}, probesMax)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		select {
		case waiting <- struct{}{}:
			defer func() { <-waiting }()
		default:
			http.Error(w, "the cache does not answer", http.StatusServiceUnavailable)
			return
		}
		answers()
		_, _ = fmt.Fprintln(w, "the cache answers")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = fmt.Fprintln(w, "ready")
	})
	return mux
}

// cacheMetrics is a prometheus.Collector.
type cacheMetrics func() serve.Report

// Describe implements prometheus.Collector. It describes nothing: Collect does.
func (cacheMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (report cacheMetrics) Collect(to chan<- prometheus.Metric) {
	r := report()
	// labels are names and values in turn
	add := func(as prometheus.ValueType, n float64, name, help string, labels ...string) {
		var names, values []string
		for k := 0; k < len(labels); k += 2 {
			names, values = append(names, labels[k]), append(values, labels[k+1])
		}
		to <- prometheus.MustNewConstMetric(prometheus.NewDesc("sluice_cache_"+name, help, names,
			nil), as, n, values...)
	}
	const count, gauge = prometheus.CounterValue, prometheus.GaugeValue
	for name, counts := range map[string]map[cache.Outcome]uint64{"load": r.Loads,
		"store": r.Stores} {
		for o, n := range counts {
			add(count, float64(n), name+"_blocks_total",
				"Blocks by what became of them: hits of loads are done.", "outcome", o.String())
		}
	}
	add(count, float64(r.LoadedBytes), "loaded_bytes_total", "Bytes of blocks that were loaded.")
	add(count, float64(r.StoredBytes), "stored_bytes_total", "Bytes of blocks that were stored.")
	for way, n := range map[string]uint64{"in": r.SwappedIn, "out": r.SwappedOut} {
		add(count, float64(n), "swapped_blocks_total", "Blocks read from, or written to, disks.",
			"way", way)
	}
	add(count, float64(r.Unwritten), "unwritten_blocks_total",
		"Blocks that no disk was given: too many waited, or none had room or bytes of its day.")
	add(count, float64(r.Expired), "expired_blocks_total", "Blocks that went by their TTL.")
	add(count, float64(r.RefusedHints), "refused_hint_blocks_total",
		"Blocks that hints were to retain beyond hold_max.")
	add(gauge, float64(r.Held), "held_bytes", "Bytes that pins and hints keep in memory.")
	for k, t := range r.Tiers {
		tier := cache.Tier(k).String()
		add(gauge, float64(t.Blocks), "blocks", "Blocks in a tier.", "tier", tier)
		add(gauge, float64(t.Bytes), "bytes", "Bytes in use in a tier.", "tier", tier)
		add(gauge, float64(t.Room), "room_bytes", "Bytes that a tier has.", "tier", tier)
		add(count, float64(t.Evicted), "evicted_blocks_total", "Blocks that had to go.",
			"tier", tier)
		for space, n := range r.Namespaces {
			add(gauge, float64(n.Bytes[k]), "namespace_bytes", "Bytes of a namespace.",
				"namespace", space, "tier", tier)
		}
	}
	for _, d := range r.Disks {
		usable, silent := 1.0, 0.0
		if d.Unused != "" {
			usable = 0
		}
		if d.Silent {
			silent = 1
		}
		add(gauge, usable, "disk_usable", "1: the disk is used; 0: it is left alone, as it is "+
			"silent or after errors.", "path", d.Path)
		add(gauge, silent, "disk_silent", "1: none of its reads and writes ends.", "path", d.Path)
		if d.Day > 0 {
			add(gauge, float64(d.Left), "disk_budget_bytes", "Bytes of bytes_a_day that may be "+
				"written at once.", "path", d.Path)
		}
	}
	if o := r.Object; o != nil {
		usable := 1.0
		if o.Unused != "" {
			usable = 0
		}
		add(gauge, usable, "object_usable", "1: the object store is used; 0: it is left alone, "+
			"after errors or as its indexes are being read.")
		add(gauge, float64(o.Blocks), "object_blocks", "Blocks in the object store.")
		add(gauge, float64(o.Bytes), "object_bytes", "Bytes of objects in the object store.")
		add(count, float64(o.Retries), "object_retries_total", "Requests that were tried again.")
		for what, n := range map[string]uint64{"read": o.Read, "written": o.Written,
			"damaged": o.Damaged, "lost": o.Lost, "refused": o.Refused} {
			add(count, float64(n), "object_blocks_total", "Blocks of the object store by what "+
				"became of them.", "what", what)
		}
	}
	add(gauge, float64(r.Running), "requests_running", "Requests that run.")
	add(gauge, float64(r.Clients), "clients", "Clients that are connected.")
	add(gauge, float64(r.Unproven), "unproven_transfers", "Transfers without a proof of their end.")
	for name, l := range r.Requests {
		sum, buckets := uint64(0), map[float64]uint64{}
		for us := int64(1); us < serve.LatencyMost; us *= 2 {
			sum += l.AtMost[us]
			buckets[float64(us)/1e6] = sum
		}
		to <- prometheus.MustNewConstHistogram(prometheus.NewDesc("sluice_cache_request_seconds",
			"How long requests took.", []string{"request"}, nil), l.Count(), l.Seconds, buckets,
			name)
	}
}
