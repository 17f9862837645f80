// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"fmt"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// Backend implements driver.Backend.
type Backend struct {
	files.Backend
	mover *mover
}

var _ driver.Backend = (*Backend)(nil)

// New opens libcuda and libcufile, and a backend. If a library or a device is missing, it returns a
// *driver.UnavailableError.
func New(cfg Config) (*Backend, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("gds: %w", err)
	}
	facts, err := Examine(cfg)
	if err != nil {
		return nil, err
	}
	if err := cfg.settle(&facts); err != nil {
		return nil, err
	}
	b := &Backend{}
	b.Backend, err = files.Open(files.Config{Caps: caps(facts.Compat), Can: driver.CanPattern,
		Memory: "device memory", Disk: "cuFile",
		KeysMax: cfg.KeysMax, JobsMax: cfg.JobsMax, Depth: cfg.Depth,
		PieceMax: uint64(cfg.PieceMax), CachedMax: cufile.EdgeMax, PlacesMax: 1, AnyReads: true,
	}, func(core *files.Core) (files.Mover, error) {
		b.mover, err = openMover(core, cfg, facts)
		return b.mover, err
	})
	if err != nil {
		return nil, fmt.Errorf("gds: %w", err)
	}
	return b, nil
}

// Facts returns the facts that the library reported when the backend was opened.
func (b *Backend) Facts() Facts { return b.mover.facts }
