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

// Report is the result of one run: the machine, the participants and the rows. The JSON keys are a
// public interface.
type Report struct {
	Machine  Machine   `json:"machine"`
	Begun    time.Time `json:"begun"`
	Revision string    `json:"revision,omitempty"` // of sluice
	Minutes  float64   `json:"minutes"`
	Quick    bool      `json:"quick,omitempty"`
	Rounds   int       `json:"rounds"`
	SliceMS  float64   `json:"slice_ms"`

	LimitMinutes float64 `json:"limit_minutes,omitempty"`

	Memory uint64  `json:"memory"` // at each end, for default shapes; 0: other shapes
	Peers  []Known `json:"peers"`
	Rows   []Row   `json:"rows"`

	before figures.Processors
}

// Machine is the machine of the run.
type Machine struct {
	Processor  string  `json:"processor"`
	Processors int     `json:"processors"`
	MemoryGiB  float64 `json:"memory_gib"`
	Kernel     string  `json:"kernel"`
	LoadBefore float64 `json:"load_before"` // load average of one minute
	LoadAfter  float64 `json:"load_after"`

	// Indicative says that other programs used the machine during the run, so that figures are only
	// indicative. Note says how much. The load average cannot tell: it includes earlier work, such
	// as building the programs.
	Indicative bool   `json:"indicative,omitempty"`
	Note       string `json:"note,omitempty"`
}

// Known is what a participant reports about itself.
type Known struct {
	Lane     Lane   `json:"lane"`
	Name     string `json:"name"`
	Version  string `json:"version"`
	Settings string `json:"settings"`
}

func newReport(o Options) *Report {
	if len(o.Shapes) > 0 {
		o.Memory = 0 // each shape has its own
	}
	return &Report{Machine: thisMachine(), Begun: time.Now().UTC().Truncate(time.Second),
		Quick: o.Quick, Rounds: o.Rounds,
		SliceMS: o.Slice.Seconds() * 1e3, LimitMinutes: o.Limit.Minutes(),
		Memory: o.Memory, Revision: o.Revision,
		before: figures.ReadProcessors()}
}

// end reads the state of the machine again, when all processes are gone.
func (r *Report) end() {
	r.Minutes = time.Since(r.Begun).Minutes()
	r.Machine.LoadAfter = load()
	r.Machine.Note = figures.ReadProcessors().Busy(r.before)
	r.Machine.Indicative = r.Machine.Note != ""
}

// compare sets the ratios in sluice's rows of one shape.
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

// Write writes the report as JSON.
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

// load returns the load average of the last minute; 0 if it is not known.
func load() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	l, _ := strconv.ParseFloat(first, 64)
	return l
}
