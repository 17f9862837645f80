// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/hostmem"
)

func newBenchCopy() *cobra.Command {
	var times timeFlags
	var result resultFlags
	var bytes string
	c := &cobra.Command{
		Use:   "copy",
		Short: "Measure every way to copy within host memory beside the one that is chosen",
		Long: `Measure how one thread copies pieces of 4 KiB to 16 MiB, in 1 MiB of memory that
the caches hold and in --bytes that they do not: by the variant that this machine's
measurement chose, beside Go's copy, libc's memcpy and every other variant that the
processor has; in alternation in one run. A variant called stream stores past the
caches. Backends mem, shm and ucx copy so. sluice doctor says what was chosen, and why;
its --tune and ` + copyVariable + ` choose otherwise.`,
		Example: `  sluice bench copy
  sluice bench copy --seconds 1 --json`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return runBenchCopy(c, bytes, &times, &result)
		},
	}
	c.Flags().StringVar(&bytes, "bytes", "256MiB", "more than the caches hold, of each of two "+
		"memories")
	times.registerTotal(c, "time to measure each shape")
	result.register(c)
	return c
}

func runBenchCopy(c *cobra.Command, bytes string, f *timeFlags, result *resultFlags) error {
	write, err := result.printer()
	if err != nil {
		return err
	}
	if err := f.checkTotal(); err != nil {
		return err
	}
	uncached, err := bench.ParseSize(bytes)
	if err == nil && uncached <= bench.CopyCached {
		err = fmt.Errorf("want more than %s, which the caches hold",
			bench.FormatSize(bench.CopyCached))
	}
	if err != nil {
		return usagef("--bytes %s: %w", bytes, err)
	}
	shapes := bench.CopyShapes(uncached)
	for i := range shapes {
		if err := shapes[i].Check(); err != nil {
			return usagef("--bytes %s: %w", bytes, err)
		}
	}
	if err := fits(shapes, hostmem.Limits().Available, false, "a smaller --bytes"); err != nil {
		return err
	}
	total := f.time()
	bar := newProgress(c.ErrOrStderr(), int64(len(shapes))*1000, "bench copy")
	defer bar.clear()
	var list []bench.Result
	m := startMeasuring(c, total*time.Duration(len(shapes)))
	for i, s := range shapes {
		o := bench.Options{Time: total, Rounds: f.rounds}
		o.Progress = func(d time.Duration) {
			bar.set(int64(i)*1000 + min(int64(1000*d/total), 999))
		}
		r, err := bench.Copy(c.Context(), s, o)
		if err != nil {
			return m.print(write, list, err)
		}
		if i > 0 {
			r.Notes = nil // the same for all
		} else if os.Getenv(copyVariable) == "" {
			r.Notes = append(r.Notes, "sluice doctor --tune FILE measures longer")
		}
		list = append(list, r)
	}
	return m.print(write, list, nil)
}
