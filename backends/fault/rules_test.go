// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

const sample = `seed 7
write size>=64KiB p=0.01: delay 5ms±1ms
batch size=0 skip=3 every=10 most=5: drop
read size<=1536 peer>=1 peer<=3 after=1.5s before=1m0s: fail lost
write peer=0: limit 12500MB/s burst=1MiB
batch: model 2µs 10ns 9GB/s
message: flap 50ms
connect peer=2: refuse unavailable
receive size>=1: !swap 5ms
fence: !skip
write: !latewrite 0s
`

func TestTextAndRulesAreOne(t *testing.T) {
	r, err := Parse(sample)
	require.NoError(t, err)
	if got := r.String(); got != sample {
		t.Errorf("printed\n%s\nof\n%s", got, sample)
	}
	want := Rule{On: Write, Size: Range{Min: 64 << 10}, Chance: 0.01, Do: Delay,
		Time: 5 * time.Millisecond, Jitter: time.Millisecond}
	if r.Seed != 7 || len(r.List) != 10 || r.List[0] != want {
		t.Errorf("%+v", r)
	}
	if err := r.Check(); err != nil || !r.Breaks() {
		t.Errorf("check: %v, breaks: %v", err, r.Breaks())
	}
}

func TestOtherSpellings(t *testing.T) {
	for text, want := range map[string]string{
		"":                     "",
		" # nothing\n\n;;\n":   "",
		"write:delay 5ms+-1ms": "write: delay 5ms±1ms\n",
		"  write  p=1 : drop ; read: swallow # x": "write: drop\nread: swallow\n",
		"write p=0.10: drop":                      "write p=0.1: drop\n",
		"write: limit 1.5GB/s":                    "write: limit 1500MB/s\n",
		"write size>=1024 : stall 1000us\r\n":     "write size>=1KiB: stall 1ms\n",
		"seed 0\nwrite: drop":                     "write: drop\n",
	} {
		r, err := Parse(text)
		if err != nil || r.String() != want {
			t.Errorf("%q: %q, %v, want %q", text, r.String(), err, want)
		}
	}
}

func TestSyntaxErrorsSayWhereAndWhat(t *testing.T) {
	for text, want := range map[string]struct {
		line, column int
		found, says  string
	}{
		"wite: drop":                          {1, 1, "wite", "write, message"},
		"write: drop\n read: dorp":            {2, 8, "dorp", "swallow"},
		"write":                               {1, 6, "", "colon"},
		"write size>64KiB: drop":              {1, 7, "size>64KiB", "size>="},
		"write size>=64kb: drop":              {1, 7, "size>=64kb", "64KiB"},
		"write size=1 size>=1: drop":          {1, 14, "size>=1", "once"},
		"write size>=1 size=1: drop":          {1, 15, "size=1", "range"},
		"write size>=2 size<=1: drop":         {1, 1, "write", "ends before"},
		"write p=0: drop":                     {1, 7, "p=0", "above 0"},
		"write p=1e-3: drop":                  {1, 7, "p=1e-3", "chance"},
		"write p=0.1 p=0.1: drop":             {1, 13, "p=0.1", "once"},
		"write every=0: drop":                 {1, 7, "every=0", "at least 1"},
		"write every=01: drop":                {1, 7, "every=01", "at least 1"},
		"write: delay":                        {1, 13, "", "5ms"},
		"write: delay -5ms":                   {1, 14, "-5ms", "5ms"},
		"write: delay 5ms±":                   {1, 14, "5ms±", "5ms"},
		"write: delay 25h":                    {1, 14, "25h", "24h"},
		"write: delay 5ms more":               {1, 18, "more", "nothing more"},
		"write: delay 1µs 1":                  {1, 18, "1", "nothing more"},
		"write: limit 5":                      {1, 14, "5", "50GB/s"},
		"write: limit 5GB/s 5":                {1, 20, "5", "burst="},
		"write: fail full":                    {1, 13, "full", "lost"},
		"write: !overtake 1ms":                {1, 8, "!overtake", "delay"},
		"connect: drop":                       {1, 10, "drop", "refuse"},
		"fence peer=1: delay 1ms":             {1, 1, "fence", "Peer"},
		"connect size=1: delay 1ms":           {1, 1, "connect", "Size"},
		"seed":                                {1, 5, "", "number"},
		"seed 1\nseed 1":                      {2, 1, "seed", "one seed"},
		"write: drop; seed 1":                 {1, 14, "seed", "before all"},
		"write after=2s before=1s: drop":      {1, 1, "write", "ends before"},
		"write: drop; write: dröp; read: x y": {1, 21, "dröp", "drop"},
	} {
		_, err := Parse(text)
		var e *SyntaxError
		if !errors.As(err, &e) {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if e.Line != want.line || e.Column != want.column || e.Found != want.found ||
			!strings.Contains(e.Error(), want.says) {
			t.Errorf("%q: %v (line %d, column %d, found %q)", text, err, e.Line, e.Column, e.Found)
		}
	}
}

func TestCheckRefusesWhatCannotBe(t *testing.T) {
	for _, r := range []Rule{
		{}, {On: Write}, {On: Write | Read, Do: Drop}, {On: Write, Do: 40},
		{On: Write, Do: Drop, Chance: 2},
		{On: Write, Do: Drop, Time: 1}, {On: Write, Do: Fail},
		{On: Write, Do: Fail, Err: errors.New("x")},
		{On: Write, Do: Limit}, {On: Write, Do: Delay, Time: -1}, {On: Write, Do: Delay, Rate: 1},
		{On: Write, Do: Stall, Jitter: 1}, {On: Write, Do: Drop, Burst: 1},
		{On: Write, Do: Delay, PerPiece: 1},
		{On: Receive, Do: Delay, Peer: Range{Min: 1}},
		{On: Write, Do: Drop, Size: Range{Min: 1, Max: 1, Exact: true}},
	} {
		if err := (&Rules{List: []Rule{r}}).Check(); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%+v: %v", r, err)
		}
	}
	if err := (&Rules{List: make([]Rule, RulesMax+1)}).Check(); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("too many rules: %v", err)
	}
}

// FuzzParse wants rules or an error with a place, and the same rules from what they print.
func FuzzParse(f *testing.F) {
	f.Add(sample)
	f.Add("write p=0.3 every=2: delay 5ms+-1ms; receive: !lose")
	f.Add("seed 18446744073709551615\ncount: stall 24h")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := Parse(text)
		var e *SyntaxError
		if err != nil {
			if !errors.As(err, &e) || e.Line < 1 || e.Column < 1 || len(r.List) > 0 {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		if err := r.Check(); err != nil {
			t.Fatalf("%q: parsed, but %v", text, err)
		}
		again, err := Parse(r.String())
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%q printed as %q: %v, %+v, want %+v", text, r.String(), err, again, r)
		}
	})
}
