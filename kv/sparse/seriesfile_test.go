// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSeriesFile(t *testing.T) {
	r := NewSeriesReader(strings.NewReader(`
{"step":-1,"layer":0,"context":8,"entries":[[7,0]]}
{"step":-1,"layer":1,"context":8,"entries":[[1]],"model":"of a later writer"}

{"step":3,"layer":0,"context":8,"entries":[[0,7],[8]]}
{"step":3,"layer":1,"context":8,"entries":[[2,2],[2,3]]}`))
	var step TopK
	require.NoError(t, r.Next(&step))
	require.Equal(t, TopK{-1, 8, 1, [][]uint32{{7, 0}, {1}}}, step)
	require.NoError(t, r.Next(&step))
	require.Equal(t, TopK{3, 8, 2, [][]uint32{{0, 7, 8}, {2, 2, 2, 3}}}, step)
	for range 2 {
		require.Equal(t, io.EOF, r.Next(&step))
	}
	require.Equal(t, io.EOF, NewSeriesReader(strings.NewReader("\n")).Next(&step))
}

// What is no series is refused, by the line that is wrong, and stays so.
func TestSeriesFileRefused(t *testing.T) {
	record := func(step, layer, context int, entries string) string {
		return fmt.Sprintf(`{"step":%d,"layer":%d,"context":%d,"entries":%s}`+"\n", step, layer,
			context, entries)
	}
	good := record(0, 0, 8, "[[1]]")
	for name, c := range map[string]struct{ text, want string }{
		"no JSON":          {"\x7fELF", "line 1"},
		"no object":        {"[1]", "line 1"},
		"a field too few":  {`{"step":0,"layer":0,"entries":[[1]]}`, "want step, layer, context"},
		"below 0":          {record(0, 0, 8, "[[-1]]"), "line 1"},
		"a fraction":       {record(0, 0, 8, "[[1.5]]"), "line 1"},
		"33 bits":          {record(0, 0, 8, "[[4294967296]]"), "line 1"},
		"behind context":   {record(0, 0, 8, "[[7],[8],[11]]"), "entry 11 of query 2"},
		"no entry":         {record(0, 0, 8, "[[]]"), "query 0 has no entry"},
		"no query":         {record(0, 0, 8, "[]"), "0 queries"},
		"17 queries":       {record(0, 0, 8, "[[1]"+strings.Repeat(",[1]", 16)+"]"), "17 queries"},
		"no context":       {record(0, 0, 0, "[[1]]"), "context of 0"},
		"a huge context":   {record(0, 0, SeriesContextMax+1, "[[1]]"), "context of 1048577"},
		"layer 256":        {record(0, 256, 8, "[[1]]"), "layer 256"},
		"another first":    {record(0, 1, 8, "[[1]]"), "begins with layer 1"},
		"a layer left out": {good + record(0, 2, 8, "[[1]]"), "line 2: layer 2 behind layer 0"},
		"other queries":    {good + record(0, 1, 8, "[[1],[2]]"), "2 queries"},
		"other context":    {good + record(0, 1, 9, "[[1]]"), "context of 9"},
		"fewer layers": {good + record(0, 1, 8, "[[1]]") + record(1, 0, 8, "[[1]]"),
			"1 layers, and those before have 2"},
		"backwards":   {record(5, 0, 8, "[[1]]") + good, "step 0 behind step 5"},
		"a line":      {good + strings.Repeat(" ", SeriesLineMax+1), "line 2: longer"},
		"wrong later": {good + record(1, 0, 8, "[[1]]") + "{}", "line 3"},
	} {
		t.Run(name, func(t *testing.T) {
			r := NewSeriesReader(strings.NewReader(c.text))
			var step TopK
			var err error
			for err == nil {
				err = r.Next(&step)
			}
			require.ErrorIs(t, err, ErrSeries)
			wrong, ok := errors.AsType[*SeriesError](err)
			require.True(t, ok)
			require.Positive(t, wrong.Line)
			require.ErrorContains(t, err, c.want)
			require.Equal(t, err, r.Next(&step))
		})
	}
	broken := errors.New("broken")
	r := NewSeriesReader(io.MultiReader(strings.NewReader(good), failing{broken}))
	require.ErrorIs(t, r.Next(&TopK{}), broken)
}

func FuzzSeriesReader(f *testing.F) {
	f.Add(`{"step":-1,"layer":0,"context":8,"entries":[[7,0]]}` + "\n" +
		`{"step":0,"layer":0,"context":8,"entries":[[1],[8]]}`)
	f.Add(`{"step":1e9,"layer":0,"context":1048577,"entries":[[]]}`)
	f.Fuzz(func(t *testing.T, text string) {
		r := NewSeriesReader(strings.NewReader(text))
		var step TopK
		var err error
		for last := math.MinInt; ; last = step.Step {
			if err = r.Next(&step); err != nil {
				break
			}
			require.True(t, step.Step > last || last == math.MinInt)
			require.NotEmpty(t, step.Entries)
			for _, entries := range step.Entries {
				require.NotEmpty(t, entries)
				require.Less(t, int(slices.Max(entries)), step.Context+step.Queries-1)
				require.Less(t, int(slices.Max(entries)), SeriesContextMax+SeriesQueriesMax)
			}
		}
		require.True(t, errors.Is(err, io.EOF) || errors.Is(err, ErrSeries), err)
	})
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
