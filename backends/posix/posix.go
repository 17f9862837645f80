// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// Backend implements driver.Backend.
type Backend struct {
	files.Backend
	core *files.Core
	ring *ring // nil: threads
}

var _ driver.Backend = (*Backend)(nil)

// New opens a backend. With PathRing it answers *driver.UnavailableError where the kernel refuses
// io_uring.
func New(cfg Config) (*Backend, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("posix: %w", err)
	}
	b := &Backend{}
	var err error
	b.Backend, err = files.Open(files.Config{Caps: caps(),
		Can:    driver.CanPattern | driver.CanDurable,
		Memory: "host memory", Disk: "the disk",
		KeysMax: cfg.KeysMax, JobsMax: cfg.JobsMax, Depth: cfg.Depth,
		PieceMax: uint64(cfg.PieceMax), CachedMax: uint64(cfg.PieceMax), SplitMin: splitMin,
		GapMax: cfg.GapMax, PlacesMax: placesMax, ScatterMax: inlineMax,
		Buffered: cfg.Buffered, Durable: cfg.Durable,
	}, func(core *files.Core) (files.Mover, error) {
		b.core = core
		if cfg.Path == PathThreads {
			return openPool(core, &cfg, "Config.Path"), nil
		}
		var err error
		if b.ring, err = openRing(core, &cfg); err == nil {
			return b.ring, nil
		}
		if cfg.Path == PathRing {
			return nil, &driver.UnavailableError{Backend: "posix", Reason: err.Error(),
				Fix: fix(err)}
		}
		return openPool(core, &cfg, err.Error()), nil
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Choice says whether requests use io_uring or threads, and why, in a few words.
func (b *Backend) Choice() string {
	if b.ring != nil {
		return "io_uring"
	}
	return b.core.Mover.(*pool).choice
}

// Examine opens a backend and returns its Choice.
func Examine(cfg Config) (choice string, err error) {
	b, err := New(cfg)
	if err != nil {
		return "", err
	}
	return b.Choice(), b.Close()
}

// explain says how bytes move to and from a file; nil: of no file.
func explain(choice string, cfg *Config, remote *files.Memory) string {
	text := choice
	if remote == nil {
		return text
	}
	if f := remote.File; f.CanDirect() {
		text += fmt.Sprintf("; past the page cache in blocks of %d bytes", f.Block)
	} else {
		text += "; through the page cache: " + f.Why
	}
	if cfg.Durable {
		text += "; writes complete after fdatasync"
	}
	return text
}

// fix says what the administrator can change so that io_uring can be used; empty: not known.
func fix(err error) string {
	disabled, _ := os.ReadFile("/proc/sys/kernel/io_uring_disabled")
	switch {
	case len(disabled) > 0 && strings.TrimSpace(string(disabled)) != "0":
		return "sysctl kernel.io_uring_disabled=0"
	case errors.Is(err, syscall.ENOSYS):
		return "a kernel with io_uring, Linux 5.6 or later"
	case errors.Is(err, syscall.EPERM):
		return "a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register"
	}
	return ""
}
