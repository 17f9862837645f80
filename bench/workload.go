// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/kv/layout"
)

// The sweeps of nixlbench: one block of each size, and batches.
const (
	SizeSweep  = "nixlbench"
	BatchSweep = "nixlbench-batch"
)

// What of a prompt's pieces goes into one operation at most, and the entries that a step of sparse
// attention asks for.
const (
	operationMax  = 128 << 20
	tokenEntries  = 2048
	promptDefault = 2048 // tokens
)

// WorkloadHelp says which names Workload takes.
func WorkloadHelp() string {
	return fmt.Sprintf("%s, %s, or a model (%s) with words behind it, such as "+
		"llama3.1-70b/layer/tp8/pp2/tokens=8192: block, layer or token, tpN, ppN, tokens=N of the "+
		"prompt (%d), block=N tokens of a block (%d)", SizeSweep, BatchSweep,
		strings.Join(layout.Names(), ", "), promptDefault, layout.BlockTokens)
}

// Workload makes the shapes that the field measures: sweeps as nixlbench has them, and what the KV
// cache of a model makes of a prompt, as kvbench does. A model without block, layer or token has
// the shapes by block and by layer. base has Op, Spread and Threads.
func Workload(name string, base Shape) (list []Shape, err error) {
	base.Where = Pages
	add := func(what string, size uint64, batch int, times float64) {
		s := base
		kept := min(batch, max(int(operationMax/size), 1))
		if batch == 1 {
			s.Where = Shuffled
		}
		s.Size, s.Batch, s.Step = size, kept, name+" "+what
		s.Times = times * float64(batch) / float64(kept)
		list = append(list, s)
	}
	switch name {
	case SizeSweep:
		for size := uint64(4 << 10); size <= 64<<20; size *= 2 {
			add("block", size, 1, 1)
		}
	case BatchSweep:
		for _, size := range []uint64{4 << 10, 64 << 10, 1 << 20} {
			for batch := 1; batch <= 4096 && size*uint64(batch) <= operationMax; batch *= 8 {
				add("blocks", size, batch, 1)
			}
		}
	default:
		err = addModel(name, add)
	}
	for i := range list {
		err = errors.Join(err, list[i].Check())
	}
	if err != nil {
		return nil, fmt.Errorf("workload %q: %w: %w", name, err, ErrShape)
	}
	return list, nil
}

// addModel adds what one rank of the fullest pipeline stage hands over of a prompt. Parts of equal
// size go together, as one list of pieces.
func addModel(name string, add func(what string, size uint64, batch int, times float64)) error {
	words := strings.Split(name, "/")
	model, err := layout.Lookup(words[0])
	if err != nil {
		return fmt.Errorf("there are %s", WorkloadHelp())
	}
	tp, pp, tokens, block := 1, 1, promptDefault, layout.BlockTokens
	numbers := map[string]*int{"tp": &tp, "pp": &pp, "tokens=": &tokens, "block=": &block}
	var accesses []string
words:
	for _, word := range words[1:] {
		if slices.Contains([]string{"block", "layer", "token"}, word) {
			accesses = append(accesses, word)
			continue
		}
		for prefix, n := range numbers {
			if digits, ok := strings.CutPrefix(word, prefix); ok {
				*n, err = strconv.Atoi(digits)
				if err != nil || *n < 1 || *n > layout.BlocksMax {
					return fmt.Errorf("%q: want a number from 1 to %d", word, layout.BlocksMax)
				}
				continue words
			}
		}
		return fmt.Errorf("%q: want block, layer, token, tpN, ppN, tokens=N or block=N", word)
	}
	stage, err := model.Stage(pp)
	if err != nil {
		return err
	}
	g, err := layout.New(stage, layout.Options{BlockTokens: block, TP: tp})
	if err != nil {
		return err
	}
	if accesses == nil {
		accesses = []string{"block", "layer"}
	}
	blocks := int(g.BlocksFor(uint64(tokens)))
	for _, access := range accesses {
		if access == "block" {
			add("all layers of a block", g.BlockBytes(), blocks, 1)
			continue
		}
		var order []uint64
		names := map[uint64][]string{}
		for i, p := range g.Parts() {
			size := g.PartBytes(i)
			if access == "token" {
				size = p.TokenBytes
			}
			if names[size] == nil {
				order = append(order, size)
			}
			names[size] = append(names[size], p.Name)
		}
		for _, size := range order {
			what, pieces := "blocks", blocks
			if access == "token" {
				what, pieces = "tokens", min(tokenEntries, tokens)
			}
			add(fmt.Sprintf("%s of %s, one layer", strings.Join(names[size], "+"), what), size,
				len(names[size])*pieces, float64(g.Layers()))
		}
	}
	return nil
}
