// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/figures"
)

// Report is one run: where, with what, and its rows. The JSON keys are an interface.
type Report struct {
	Machine  Machine   `json:"machine"`
	Begun    time.Time `json:"begun"`
	Revision string    `json:"revision,omitempty"` // of sluice
	Minutes  float64   `json:"minutes"`
	Quick    bool      `json:"quick,omitempty"`
	Rounds   int       `json:"rounds"`
	SliceMS  float64   `json:"slice_ms"`

	LimitMinutes float64 `json:"limit_minutes,omitempty"`

	Memory uint64  `json:"memory"` // that default shapes are drawn from at each end; else 0
	Peers  []Known `json:"peers"`
	Rows   []Row   `json:"rows"`

	before figures.Processors
}

// Machine is where the run was.
type Machine struct {
	Processor  string  `json:"processor"`
	Processors int     `json:"processors"`
	MemoryGiB  float64 `json:"memory_gib"`
	Kernel     string  `json:"kernel"`
	LoadBefore float64 `json:"load_before"` // of one minute
	LoadAfter  float64 `json:"load_after"`

	// Indicative says that others used the machine meanwhile: the load average does not, since it
	// remembers what built the programs. Note says how much.
	Indicative bool   `json:"indicative,omitempty"`
	Note       string `json:"note,omitempty"`
}

// Known is what a participant says of itself.
type Known struct {
	Lane     Lane   `json:"lane"`
	Name     string `json:"name"`
	Version  string `json:"version"`
	Settings string `json:"settings"`
}

func newReport(o Options) *Report {
	if len(o.Shapes) > 0 {
		o.Memory = 0 // each shape says its own
	}
	return &Report{Machine: thisMachine(), Begun: time.Now().UTC().Truncate(time.Second),
		Quick: o.Quick, Rounds: o.Rounds,
		SliceMS: o.Slice.Seconds() * 1e3, LimitMinutes: o.Limit.Minutes(),
		Memory: o.Memory, Revision: o.Revision,
		before: figures.ReadProcessors()}
}

// end looks at the machine once more, when all processes are gone.
func (r *Report) end() {
	r.Minutes = time.Since(r.Begun).Minutes()
	r.Machine.LoadAfter = load()
	r.Machine.Note = figures.ReadProcessors().Busy(r.before)
	r.Machine.Indicative = r.Machine.Note != ""
}

// compare fills the ratios of ours in the rows of one shape.
func (r *Report) compare(rows []Row) {
	for i := range rows {
		ours := &rows[i]
		for _, base := range rows {
			if !ours.Ours || !base.Yardstick || ours.GBps == 0 || base.GBps == 0 {
				continue
			}
			if ours.Ratios == nil {
				ours.Ratios = map[string]float64{}
			}
			ours.Ratios[base.Peer] = ours.GBps / base.GBps
		}
	}
}

func (r *Report) add(row Row) { r.Rows = append(r.Rows, row) }

func (r *Report) addPeer(p *Pair) {
	k := Known{p.Lane, p.Name, p.Version, p.Settings}
	if !slices.Contains(r.Peers, k) {
		r.Peers = append(r.Peers, k)
	}
}

// Write writes JSON.
func (r *Report) Write(w io.Writer) error {
	out := json.NewEncoder(w)
	out.SetIndent("", " ")
	return out.Encode(r)
}

func thisMachine() Machine {
	m := Machine{Processor: "unknown", Processors: runtime.NumCPU(), LoadBefore: load()}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, after, ok := strings.Cut(string(text), "model name\t: "); ok {
			m.Processor, _, _ = strings.Cut(after, "\n")
		}
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryGiB = float64(info.Totalram*uint64(info.Unit)) / (1 << 30)
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	return m
}

// load is that of the last minute; 0 where the kernel does not say.
func load() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	l, _ := strconv.ParseFloat(first, 64)
	return l
}
