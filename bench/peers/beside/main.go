// SPDX-License-Identifier: Apache-2.0

// Beside measures sluice and other transfer engines side by side: see package peers, and
// "make bench-peers", which builds the drivers and makes the environments that it needs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/peers"
	"github.com/sluicehq/sluice/bench/plot"
)

// options are the command line.
type options struct {
	run                      peers.Options
	bin, scripts, envs, out  string
	files                    string
	only, lane, from, memory string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := beside(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "beside:", err)
		os.Exit(1)
	}
}

func parse(args []string, stderr io.Writer) (*options, error) {
	var o options
	f := flag.NewFlagSet("beside", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.BoolVar(&o.run.Quick, "quick", false, "fewer shapes and repeats: some minutes")
	f.IntVar(&o.run.Rounds, "rounds", 0, "rounds of each shape; 0: 5, quick 3")
	f.DurationVar(&o.run.Slice, "slice", 0, "of one participant in one round; 0: 100ms")
	f.DurationVar(&o.run.Fate, "fate", 0, "how long a caller has to notice a dead or frozen "+
		"peer; 0: 20s, quick 16s")
	f.DurationVar(&o.run.Limit, "limit", 0, "of the whole run: rounds are cut, and what there is "+
		"no time for is a row that says so; 0: 20m, quick 8m")
	f.StringVar(&o.memory, "memory", "512MiB", "memory registered at each end; an operation "+
		"moves half of it at most")
	f.StringVar(&o.bin, "bin", "build/peers", "folder of the drivers in Go")
	f.StringVar(&o.scripts, "scripts", "bench/peers/drivers", "folder of the drivers in Python")
	f.StringVar(&o.envs, "envs", "build/peers/envs", "folder of the environments for Python, as "+
		"setup.sh makes them")
	f.StringVar(&o.files, "files", "build/peers", "folder on the disk that lane file measures: "+
		"its files have no names and end with the run")
	f.StringVar(&o.out, "out", "build/peers/peers", "the files that are written, without .txt, "+
		".json and .svg")
	f.StringVar(&o.only, "only", "", "participants, with commas; empty: all")
	f.StringVar(&o.lane, "lane", "", "host, tcp, rdma or file; empty: all")
	f.StringVar(&o.run.Revision, "revision", "", "of sluice, for the report")
	f.StringVar(&o.from, "from", "", "print and draw this report, and measure nothing")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	var err error
	o.run.Memory, err = bench.ParseSize(o.memory)
	return &o, err
}

func beside(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	report, err := o.report(ctx, stderr)
	if report != nil && len(report.Rows) > 0 {
		err = errors.Join(err, o.write(report, stdout), o.draw(ctx, report))
	}
	return err
}

// report measures, or reads what was measured.
func (o *options) report(ctx context.Context, stderr io.Writer) (*peers.Report, error) {
	if o.from != "" {
		f, err := os.Open(o.from)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return peers.Read(f)
	}
	list := peers.Participants(peers.Where{Bin: o.bin, Scripts: o.scripts, Python: o.python,
		Files: o.files})
	names := strings.Split(o.only, ",")
	list = slices.DeleteFunc(list, func(p peers.Participant) bool {
		return o.lane != "" && string(p.Lane) != o.lane || o.only != "" &&
			!slices.Contains(names, p.Name)
	})
	if len(list) == 0 {
		return nil, fmt.Errorf("no participant is called %q on lane %q", o.only, o.lane)
	}
	begun := time.Now()
	o.run.Progress = func(s string) {
		fmt.Fprintf(stderr, "%5.0f s  %s\n", time.Since(begun).Seconds(), s)
	}
	return peers.Run(ctx, list, o.run)
}

func (o *options) python(peer string) string { return filepath.Join(o.envs, peer, "bin", "python") }

func (o *options) write(r *peers.Report, stdout io.Writer) error {
	if err := os.MkdirAll(filepath.Dir(o.out), 0o755); err != nil {
		return err
	}
	for suffix, print := range map[string]func(io.Writer) error{".json": r.Write, ".txt": r.Text} {
		f, err := os.Create(o.out + suffix)
		if err != nil {
			return err
		}
		if err := errors.Join(print(f), f.Close()); err != nil {
			return err
		}
	}
	return r.Text(stdout)
}

// draw makes the picture; without the library for it there is none.
func (o *options) draw(ctx context.Context, r *peers.Report) error {
	python := o.python("plot")
	if _, err := os.Stat(python); err != nil {
		return fmt.Errorf("no picture: %s is not there: run bench/peers/setup.sh", python)
	}
	return plot.Draw(context.WithoutCancel(ctx), python, r, o.out+".svg")
}
