// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/replay"
)

// offloadFlags say where blocks are spilled to.
type offloadFlags struct {
	to, file, dir, size string
	durable             bool
}

func (f *offloadFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&f.to, "offload", "", "spill blocks and read them back: ssd, a file")
	s.StringVar(&f.file, "offload-file", "", "the file, which is kept, and taken up again where "+
		"it is there")
	s.StringVar(&f.dir, "offload-dir", os.TempDir(), "where a file that is not kept lies: a "+
		"directory on the disk")
	s.StringVar(&f.size, "offload-size", "", "bytes of blocks in the file (default: all of the "+
		"trace, at most 4GiB)")
	s.BoolVar(&f.durable, "offload-durable", false, "a block is spilled once the disk has it")
}

// options checks the flags; nil: no offload.
func (f *offloadFlags) options(given func(flag string) bool) (*replay.Offload, error) {
	if f.to == "" && !given("offload") {
		for _, name := range []string{"offload-file", "offload-dir", "offload-size",
			"offload-durable"} {
			if given(name) {
				return nil, usagef("--%s says how blocks are spilled: give --offload ssd as well",
					name)
			}
		}
		return nil, nil
	}
	if f.to != "ssd" {
		return nil, usagef("--offload %q: there is ssd", f.to)
	}
	if given("offload-file") && f.file == "" {
		return nil, usagef("--offload-file: want a path; without the flag the file is not kept")
	}
	if given("offload-file") && given("offload-dir") {
		return nil, usagef("--offload-dir is for a file that is not kept: --offload-file says " +
			"where the other one lies")
	}
	// Before minutes of work: the decode process makes the file there.
	dir, at := f.dir, "--offload-dir "+f.dir
	if f.file != "" {
		dir, at = filepath.Dir(f.file), "--offload-file "+f.file
	}
	if s, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("%s: %w: make the directory, or name another", at, err)
	} else if !s.IsDir() {
		return nil, fmt.Errorf("%s: %s is not a directory: name one", at, dir)
	}
	o := &replay.Offload{File: f.file, Dir: f.dir, Durable: f.durable}
	if given("offload-size") {
		n, err := bench.ParseSize(f.size)
		if err != nil {
			return nil, &usageError{err}
		}
		if n == 0 {
			return nil, usagef("--offload-size %s: want room for a block at least", f.size)
		}
		o.Bytes = n
	}
	return o, nil
}
