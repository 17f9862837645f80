// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"errors"
	"fmt"
	"math"
	"strconv"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
)

// Facts are the properties of cuFile on this machine, as the library reports them.
type Facts struct {
	Version   string // "1.14"; "before 1.8" if the library does not report it
	Batches   bool   // it has cuFileBatchIO*, in a version where they work
	Compat    bool   // cuFile copies through host memory
	Mode      string // how bytes move, in words
	BatchMax  int    // most entries of a batch; 0: not reported
	DirectMax uint64 // most bytes of one request to the driver; 0: not reported
	PinnedMax uint64 // bytes of device memory that may be registered
	CacheMax  uint64 // bytes of the library's own buffers on a device
}

// String returns the facts in one line.
func (f *Facts) String() string {
	return fmt.Sprintf("cuFile %s: %s; batches of %d: %s, requests to %s, pins %s, "+
		"buffers of %s", f.Version, f.Mode,
		f.BatchMax, yes(f.Batches), size(f.DirectMax), size(f.PinnedMax), size(f.CacheMax))
}

func yes(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}

// size formats a number of bytes in the largest unit that gives at least 1, with two decimals at
// most.
func size(n uint64) string {
	v, unit := float64(n), 0
	for ; v >= 1<<10 && unit < len(sizeUnits)-1; unit++ {
		v /= 1 << 10
	}
	return strconv.FormatFloat(math.Round(v*100)/100, 'f', -1, 64) + " " + sizeUnits[unit]
}

var sizeUnits = [...]string{"B", "KiB", "MiB", "GiB", "TiB"}

// Examine opens the libraries, which stay open, and returns the facts. If there is no device, it
// does not open cuFile and returns a *driver.UnavailableError. In compat mode with Config.Direct it
// returns such an error together with the facts.
func Examine(cfg Config) (Facts, error) {
	if err := gpu.Load(cfg.CUDA); err != nil {
		return Facts{}, withoutDevice(err)
	}
	if _, err := gpu.Devices(); err != nil {
		return Facts{}, withoutDevice(err)
	}
	if err := cufile.Load(cfg.Library); err != nil {
		return Facts{}, err
	}
	said, err := cufile.ReadFacts()
	if err != nil {
		return Facts{}, fmt.Errorf("gds: %w", err)
	}
	f := Facts{Version: "before 1.8", Batches: said.Batches,
		BatchMax:  said.BatchMax,
		DirectMax: said.DirectMax, PinnedMax: said.PinnedMax, CacheMax: said.CacheMax}
	if said.Version > 0 {
		f.Version = fmt.Sprintf("%d.%d", said.Version/1000, said.Version%1000/10)
	}
	f.Compat, f.Mode = mode(&said)
	if cfg.Direct && f.Compat {
		return f, unavailable("Config.Direct, and "+f.Mode,
			"modprobe nvidia-fs, and no force_compat_mode in cufile.json")
	}
	return f, nil
}

// mode derives the mode from the driver and the configuration, since the library does not report it
// for a single file.
func mode(f *cufile.Facts) (compat bool, text string) {
	switch {
	case f.ForceCompat == 1:
		return true, "cuFile compat: bounces through host (force_compat_mode is set)"
	case f.NVFSMajor == 0 && f.NVFSMinor == 0 && f.PCIP2PDMA == 1:
		return false, "no nvidia-fs: direct by PCI P2PDMA where the file's disk has it, else " +
			"cuFile compat"
	case f.NVFSMajor == 0 && f.NVFSMinor == 0:
		return true, "cuFile compat: bounces through host (nvidia-fs is not loaded)"
	}
	return false, fmt.Sprintf("nvidia-fs %d.%d: direct where the file's disk and filesystem "+
		"allow it, else cuFile compat, which cuFile does not tell",
		f.NVFSMajor, f.NVFSMinor)
}

// withoutDevice adds to the error of a missing driver that gds needs a device.
func withoutDevice(err error) error {
	var missing *driver.UnavailableError
	if !errors.As(err, &missing) {
		return err
	}
	return unavailable("cuFile is not opened without a device: "+missing.Reason, missing.Fix)
}

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "gds", Reason: reason, Fix: fix}
}
