// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/driver"
	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// Workload is a named list of shapes that the field measures: sweeps as nixlbench has them, and
// what the KV cache of a model makes of a prompt, as kvbench does.
type Workload struct {
	Name, About string
	Steps       []Step
}

// Step is one shape of a workload.
type Step struct {
	Shape
	Name string
	// how often a hand-over of the prompt takes it: once a layer, where that is the access
	Times int
	Cut   int // pieces that the prompt has beyond the Batch that memory allows; else 0
}

// WorkloadOptions are what a workload does not say itself. The zero value of a field means its
// default.
type WorkloadOptions struct {
	Op          driver.Op
	Tokens      int    // of the prompt; default 2,048
	BlockTokens int    // default kvlayout.BlockTokens
	Threads     int    // default 1
	BytesMax    uint64 // of an operation; more pieces are cut; default 128 MiB
	// bytes of the pool that blocks lie in, at least twice an operation; default 1 GiB
	Spread uint64
}

// The defaults, and the entries that a step of sparse attention asks for.
const (
	workloadTokens = 2048
	workloadBytes  = 128 << 20
	tokenEntries   = 2048
)

func (o WorkloadOptions) withDefaults() WorkloadOptions {
	if o.Tokens == 0 {
		o.Tokens = workloadTokens
	}
	if o.BlockTokens == 0 {
		o.BlockTokens = kvlayout.BlockTokens
	}
	if o.Threads == 0 {
		o.Threads = 1
	}
	if o.BytesMax == 0 {
		o.BytesMax = workloadBytes
	}
	return o
}

// ErrWorkload is what every error about a workload's name or options is.
var ErrWorkload = errors.New("bad workload")

// The sweeps of nixlbench: one block of each size, and batches.
const (
	SizeSweep  = "nixlbench"
	BatchSweep = "nixlbench-batch"
)

// The ways to access a model's cache.
const (
	blockAccess = "block"
	layerAccess = "layer"
	tokenAccess = "token"
)

// Workloads lists what NewWorkload knows, with one line about each. To the name of a model may be
// added, each after a slash: block, layer or token, tpN and ppN.
func Workloads() []Workload {
	list := []Workload{
		{Name: SizeSweep, About: "one block of 4 KiB to 64 MiB, as nixlbench sweeps unless " +
			"told otherwise"},
		{Name: BatchSweep, About: "4 KiB, 64 KiB and 1 MiB in batches of 1 to 4,096 blocks"},
	}
	for _, name := range kvlayout.Names() {
		m, err := kvlayout.Lookup(name)
		if err != nil {
			continue // no name of its own list
		}
		list = append(list, Workload{Name: name, About: fmt.Sprintf("%d layers, %d bytes a token "+
			"and layer: /block, /layer, /token, /tpN, /ppN", m.Layers, m.TokenLayerBytes())})
	}
	return list
}

// NewWorkload makes the shapes of a name such as "nixlbench" or "llama3.1-70b/layer/tp8/pp2".
// A model without an access has those by block and by layer.
func NewWorkload(name string, o WorkloadOptions) (*Workload, error) {
	o = o.withDefaults()
	w := &Workload{Name: name}
	switch name {
	case SizeSweep:
		for size := uint64(4 << 10); size <= 64<<20; size *= 2 {
			w.add(o, "block", size, 1, 1)
		}
	case BatchSweep:
		for _, size := range []uint64{4 << 10, 64 << 10, 1 << 20} {
			for batch := 1; batch <= 4096 && size*uint64(batch) <= o.BytesMax; batch *= 8 {
				w.add(o, "blocks", size, batch, 1)
			}
		}
	default:
		if err := w.addModel(name, o); err != nil {
			return nil, err
		}
	}
	for i := range w.Steps {
		if err := w.Steps[i].Check(); err != nil {
			return nil, fmt.Errorf("workload %q: %w: %w", name, err, ErrWorkload)
		}
	}
	return w, nil
}

// add cuts a batch to what memory allows. Pieces lie at random places, as blocks of a pool do, but
// for a single one.
func (w *Workload) add(o WorkloadOptions, what string, size uint64, batch, times int) {
	kept := min(batch, max(int(o.BytesMax/size), 1))
	s := Shape{Op: o.Op, Size: size, Batch: kept, Threads: o.Threads}
	if batch > 1 {
		s.Pages, s.Spread = true, o.Spread
	}
	w.Steps = append(w.Steps, Step{Shape: s, Name: w.Name + " " + what, Times: times,
		Cut: batch - kept})
}

// modelName is a workload's name taken apart.
type modelName struct {
	model    kvlayout.Model
	accesses []string
	tp, pp   int
}

func parseModel(name string) (*modelName, error) {
	words := strings.Split(name, "/")
	m, err := kvlayout.Lookup(words[0])
	if err != nil {
		return nil, fmt.Errorf("workload %q: neither %s nor %s, and %w: %w", name, SizeSweep,
			BatchSweep, err, ErrWorkload)
	}
	n := &modelName{model: m, tp: 1, pp: 1}
	for _, word := range words[1:] {
		ranks, isTP := strings.CutPrefix(word, "tp")
		stages, isPP := strings.CutPrefix(word, "pp")
		switch {
		case word == blockAccess || word == layerAccess || word == tokenAccess:
			n.accesses = append(n.accesses, word)
		case isTP:
			n.tp, err = positive(ranks)
		case isPP:
			n.pp, err = positive(stages)
		default:
			err = errors.New("want block, layer, token, tpN or ppN")
		}
		if err != nil {
			return nil, fmt.Errorf("workload %q: %q: %w: %w", name, word, err, ErrWorkload)
		}
	}
	if n.accesses == nil {
		n.accesses = []string{blockAccess, layerAccess}
	}
	return n, nil
}

func positive(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err == nil && n < 1 {
		err = errors.New("want 1 or more")
	}
	return n, err
}

// addModel adds what one rank of one stage hands over of a prompt.
func (w *Workload) addModel(name string, o WorkloadOptions) error {
	n, err := parseModel(name)
	if err != nil {
		return err
	}
	stage, err := n.model.Stage(n.pp)
	if err != nil {
		return fmt.Errorf("workload %q: %w: %w", name, err, ErrWorkload)
	}
	g, err := kvlayout.New(stage, kvlayout.Options{BlockTokens: o.BlockTokens, TP: n.tp})
	if err != nil {
		return fmt.Errorf("workload %q: %w: %w", name, err, ErrWorkload)
	}
	if o.Tokens < 1 || o.Tokens > kvlayout.BlocksMax {
		return fmt.Errorf("workload %q: a prompt of %d tokens: %w", name, o.Tokens, ErrWorkload)
	}
	for _, access := range n.accesses {
		w.addAccess(o, g, access)
	}
	return nil
}

// addAccess adds the operations of one way to access the cache. Parts of equal size go together, as
// one list of pieces.
func (w *Workload) addAccess(o WorkloadOptions, g *kvlayout.Geometry, access string) {
	blocks := int(g.BlocksFor(uint64(o.Tokens)))
	if access == blockAccess {
		w.add(o, "all layers of a block", g.BlockBytes(), blocks, 1)
		return
	}
	count, names := map[uint64]int{}, map[uint64][]string{}
	var order []uint64
	for i, p := range g.Parts() {
		size := g.PartBytes(i)
		if access == tokenAccess {
			size = p.TokenBytes
		}
		if count[size] == 0 {
			order = append(order, size)
		}
		count[size]++
		names[size] = append(names[size], p.Name)
	}
	for _, size := range order {
		parts := strings.Join(names[size], "+")
		if access == tokenAccess {
			w.add(o, parts+" of tokens, one layer", size, count[size]*min(tokenEntries, o.Tokens),
				g.Layers())
			continue
		}
		w.add(o, parts+" of blocks, one layer", size, count[size]*blocks, g.Layers())
	}
}

// Step names the result after a step of a workload, and says what the whole prompt takes.
func (r *Result) Step(s *Step) {
	r.Workload = s.Name
	if r.Extra == nil {
		r.Extra = map[string]float64{}
	}
	r.Extra["handover-ms"] = r.P50us / 1e3 * float64(s.Times) * float64(s.Batch+s.Cut) / float64(
		s.Batch)
	if s.Cut > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d of %d pieces in an operation, for memory's "+
			"sake; handover-ms is for all of them", s.Batch, s.Batch+s.Cut))
	}
}
