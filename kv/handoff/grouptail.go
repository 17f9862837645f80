// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// zeros is memory full of zeros, from which tails outside DRAM are filled.
type zeros struct {
	memory *engine.Memory
	region *engine.Region
	self   *engine.Peer
	remote *engine.Remote
}

// prepareZeros allocates zeros for the largest tail, if any region is not DRAM.
func (r *GroupReceiver) prepareZeros() error {
	var most uint64
	for i := range r.side.Views {
		if v := &r.side.Views[i]; r.memory[v.Region] == nil {
			most = max(most, v.Cell*uint64(v.Count)*uint64(v.Tokens))
		}
	}
	if most == 0 {
		return nil
	}
	z, err := r.newZeros(most)
	if err != nil {
		return fmt.Errorf("group: zeros for what lies behind a request: %w",
			errors.Join(err, z.close()))
	}
	r.zeros = z
	return nil
}

func (r *GroupReceiver) newZeros(n uint64) (z zeros, err error) {
	if z.memory, err = r.mux.eng.Alloc(n, engine.AllocOptions{Purpose: "zeros"}); err != nil {
		return z, err
	}
	z.region, err = r.mux.eng.RegisterPrivate("zeros "+rand.Text(), z.memory.Segment())
	if err != nil {
		return z, err
	}
	if z.self, err = r.mux.eng.Self(); err != nil {
		return z, err
	}
	z.remote, err = z.self.Remote(z.region.Name())
	return z, err
}

func (z *zeros) close() error {
	var errs []error
	if z.region != nil {
		errs = append(errs, z.region.Close())
	}
	if z.memory != nil {
		errs = append(errs, z.memory.Close())
	}
	return errors.Join(errs...)
}

// zeroTails fills the rest of this rank's last blocks, behind a span, with zeros.
func (r *GroupReceiver) zeroTails(ctx context.Context, t layout.Tables, s layout.Span) error {
	var patterns []engine.Pattern
	var err error
	for _, layer := range r.layers() {
		if patterns, err = r.cfg.Plan.Tail(patterns, r.cfg.Index, layer, t, s); err != nil {
			return err
		}
	}
	far := patterns[:0]
	for i := range patterns {
		p := &patterns[i]
		memory := r.memory[p.LocalKey]
		if memory == nil {
			far = append(far, *p)
			continue
		}
		for n := range p.Count {
			for _, d := range p.AppendDescs(nil, n) {
				clear(memory[d.Local : d.Local+d.Len])
			}
		}
	}
	if len(far) == 0 {
		return nil
	}
	return r.readZeros(ctx, far)
}

func (r *GroupReceiver) readZeros(ctx context.Context, patterns []engine.Pattern) (err error) {
	t, err := r.mux.eng.NewTransfer(r.zeros.self, engine.Read, engine.Route{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	for _, p := range patterns {
		if err := t.AddPattern(r.cfg.Regions[p.LocalKey], r.zeros.remote, p); err != nil {
			return err
		}
	}
	if err := t.Post(); err != nil {
		return err
	}
	if err := t.Wait(ctx); err != nil {
		return errors.Join(err, withoutProof(t.Abort(context.Background())))
	}
	return nil
}
