"""The text that the demo has its model read, written for it, and the question about it."""

from __future__ import annotations

from typing import Final

QUESTION: Final = "What word did the keeper write beside a damaged line?"

STORY: Final = """\
The lighthouse of Skarn stands on a rock that has no trees. For eleven months of the year the supply boat cannot land,
so whatever the keeper wants to know again in winter has to be written down before the autumn storms. Ada Brennick, who
kept the light for thirty-one years, wrote it in a ledger with a green cloth cover, and this is an account of how that
ledger was kept.

The pilots of the strait asked her for soundings. A ship that wanted to pass the shoals at night would signal the number
of a buoy, and the keeper would signal back the depth of the water beside it, measured by hand from a small boat with a
weight and a knotted line. Measuring took most of a day. Reading a number from a page took a moment. Nobody would have
needed a ledger if measuring were quick, and nobody would have trusted one if reading were careless, and Ada said that
everything she knew about her work followed from these two facts.

In her first winter she learned how a page goes wrong. A lamp leaked, and oil spread over a column of figures until a
three looked like an eight. A gull came in through the broken pane and walked across the desk. The assistant, a tired
boy called Tomas, copied the depth of the eleventh buoy into the row of the twelfth, and the depth of the twelfth into
the row of the eleventh, in his best hand, so that both figures were clean, and likely, and wrong. Of these three
accidents the third frightened her most. Oil can be seen. A gull leaves feathers. But a good figure in the wrong row
looks like every other figure, and a captain who is told nine fathoms where there are four will not come back to
complain.

So she made rules. Beside each depth she wrote a small sum, made from the digits of the depth, of the buoy and of the
day, each multiplied by the place in which it stood. When a signal came she did not read the depth alone. She read it,
made the sum again with the number of the buoy that the captain had asked for, and looked whether it was the sum on the
page. If oil had changed a digit, the sum came out different. If Tomas had exchanged two rows, the digits were right
and the buoy was not, and the sum came out different too. It cost her the time of three breaths.

If the sums agreed, she signalled the depth. If they did not, she never guessed. She did not signal the figure that
seemed more likely, and she never corrected a sum to make it fit, since a sum that is written to fit the figure beside
it says nothing about the figure. She signalled that she had no sounding for that buoy, which was an answer that every
captain understood: drop anchor, wait for the morning, and measure again. Then she drew a ring around the damaged line
and wrote beside it the single word "unknown". She did not cut the page out. What had gone wrong was worth keeping, she
said, because a page that has been spoiled once by a leaking lamp will be spoiled again until somebody mends the lamp.

Captains grumbled about the answer at first. A morning is a long time to lie at anchor with a cargo of fish. One of
them, a man called Orsolo who was always in a hurry, offered her a barrel of apples every autumn if she would give him
her best guess in place of a refusal. She asked him how many barrels he would want for his ship. After that he lay at
anchor like the others, and in twenty years he lay there four times.

There was one more rule, and she was proud of it, because it took her ten years to find. She had always checked the line
in the ledger. But the captain did not sail by the ledger: he sailed by the lamp signals that he had read in the dark
and chalked on a slate beside the wheel. A line could be right on the page and wrong on the slate. From then on she had
every captain signal the depth and the buoy back to her from the slate, and it was that answer, not the page, which had
to have the right sum. Twice in the first year the page was right and the slate was wrong. Both ships waited, asked
again, and passed.

When the wind blew a whole page away she measured a whole page again, and thought no less of the ledger. It was never
meant to hold everything. It was meant to save days of measuring, and never once to sell a wrong depth for a right one.
The visitors who came to see the light in summer used to ask how many lines of the ledger were lost. Tomas, by then a
grey man who kept the light himself, had counted them: four hundred and six, in thirty-one years. Then they asked how
many ships were lost. He would turn the green book around on the desk, so that they could look for themselves, and say
that there was no column for that, because there had never been anything to write in it.
"""
